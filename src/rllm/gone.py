"""What the rLLM framework has and this project has not: whoever imports it is told what stands in its place.

`docs/upstream.md` has the same, and what has only another name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

_SESSION = "rllm.sdk has the names themselves, such as session and get_current_session"
_CLIENT = "rllm.sdk.get_chat_client and get_chat_client_async make every client"
_CALLS = "every call is in the store (rllm.store.open_store) and in session(...).llm_calls"
_GATEWAY = "`rllm gateway` stands in its place; for a LiteLLM proxy of your own there is rllm.integrations.litellm"
_FUNCTION_ENGINE = "use AgentTrainer(agent_run_func=...), with backend='verl' for verl"
_WORKFLOW_ENGINE = "use AgentWorkflowEngine, whose results are in the order of the tasks"
_COMPLETER = "use OpenAIEngine, or a RolloutEngine of your own"
_BACKENDS = "the backends are local and verl: AgentTrainer(backend=...)"
_TRAINER = "use rllm.trainer.AgentTrainer"
_MCP = "give ToolAgent and ToolEnvironment the tools of rllm.tools.mcp_tool.mcp_tools"
_CODING = "use SingleTurnEnvironment with code_reward_fn, and an agent of your own"
_PROGRAM = "run the program itself with rllm.sdk.run_program, or write a BaseEnv"
_PYTHON = "use rllm.tools.python_tool.PythonInterpreter"
_SEARCH = "use rllm.tools.local_search.LocalSearch, an MCP server, or a function of your own"
_CHAT_PARSER = "ChatTemplateParser.get_parser(tokenizer) serves every model: the tokenizer has the template"
_DATASET = "use rllm.data.Dataset and DatasetRegistry"
_FUNCTION = "give AgentTrainer a function, agent_run_func=..., that returns its reward"
_TIMING = "the viewer's page Time shows it, and OpenTelemetry gets it (gateway.otel=true)"
_EPISODE_LOG = "use rllm.engine.episode_log.EpisodeLog"

GONE = {
    "rllm.sdk.session": _SESSION,
    "rllm.sdk.chat": _CLIENT,
    "rllm.sdk.tracers": _CALLS,
    "rllm.sdk.store": _CALLS,
    "rllm.sdk.SessionBuffer": _CALLS,
    "rllm.sdk.SessionBufferProtocol": _CALLS,
    "rllm.sdk.InMemorySessionTracer": _CALLS,
    "rllm.sdk.SqliteTracer": _CALLS,
    "rllm.sdk.TracerProtocol": _CALLS,
    "rllm.sdk.protocol.LLMInput": "a Trace has messages and prompt_ids",
    "rllm.sdk.protocol.LLMOutput": "a Trace has response, response_ids, logprobs and finish_reason",
    "rllm.sdk.data_process": "the steps of a session have their tokens: session(...).steps, Step.from_trace",
    "rllm.sdk.proxy.metadata_slug": _GATEWAY,
    "rllm.sdk.proxy.middleware": _GATEWAY,
    "rllm.sdk.proxy.MetadataRoutingMiddleware": _GATEWAY,
    "rllm.sdk.proxy.SamplingParametersCallback": _GATEWAY,
    "rllm.sdk.proxy.TracingCallback": _GATEWAY,
    "rllm.sdk.proxy.litellm_callbacks": _GATEWAY,
    "rllm.sdk.proxy.litellm_server": _GATEWAY,
    "rllm.sdk.proxy.VerlProxyManager": _GATEWAY,
    "rllm.sdk.proxy.proxy_manager.VerlProxyManager": _GATEWAY,
    "rllm.engine.AgentSdkEngine": _FUNCTION_ENGINE,
    "rllm.engine.agent_sdk_engine": _FUNCTION_ENGINE,
    "rllm.engine.VerlEngine": _FUNCTION_ENGINE,
    "rllm.engine.rollout.VerlEngine": _FUNCTION_ENGINE,
    "rllm.engine.rollout.verl_engine": _FUNCTION_ENGINE,
    "rllm.engine.rollout.TinkerEngine": _BACKENDS,
    "rllm.engine.rollout.tinker_engine": _BACKENDS,
    "rllm.engine.TinkerEngine": _BACKENDS,
    "rllm.engine.rollout.Completer": _COMPLETER,
    "rllm.engine.rollout.TITOCompleter": _COMPLETER,
    "rllm.engine.rollout.completer": _COMPLETER,
    "rllm.engine.UnifiedWorkflowEngine": _WORKFLOW_ENGINE,
    "rllm.engine.unified_workflow_engine": _WORKFLOW_ENGINE,
    "rllm.patches": "vLLM tells token ids since 0.10.2, without a patch",
    "rllm.agents.MCPToolAgent": _MCP,
    "rllm.agents.tool_agent.MCPToolAgent": _MCP,
    "rllm.agents.CompetitionCodingAgent": _CODING,
    "rllm.agents.code_agent": _CODING,
    "rllm.agents.SWEAgent": _PROGRAM,
    "rllm.agents.swe_agent": _PROGRAM,
    "rllm.agents.MiniWobAgent": _PROGRAM,
    "rllm.agents.miniwob_agent": _PROGRAM,
    "rllm.agents.WebArenaAgent": _PROGRAM,
    "rllm.agents.webarena_agent": _PROGRAM,
    "rllm.agents.appworld_react_agents": _PROGRAM,
    "rllm.agents.system_prompts": "give an agent its system_prompt=",
    "rllm.agents.utils": "tokens are those that were sampled, and are never made of messages",
    "rllm.environments.tools.mcp_env": _MCP,
    "rllm.environments.CompetitionCodingEnv": _CODING,
    "rllm.environments.code": _CODING,
    "rllm.environments.SWEEnv": _PROGRAM,
    "rllm.environments.swe": _PROGRAM,
    "rllm.environments.BrowserGymEnv": _PROGRAM,
    "rllm.environments.browsergym": _PROGRAM,
    "rllm.environments.appworld": _PROGRAM,
    "rllm.environments.env_utils": "use trajectory.final_reward() and step.mc_return",
    "rllm.tools.PythonInterpreter": _PYTHON,
    "rllm.tools.code_tools": _PYTHON,
    "rllm.tools.web_tools": _SEARCH,
    "rllm.tools.GoogleSearchTool": _SEARCH,
    "rllm.tools.FirecrawlTool": _SEARCH,
    "rllm.tools.TavilySearchTool": _SEARCH,
    "rllm.tools.TavilyExtractTool": _SEARCH,
    "rllm.tools.utils": "Tool(function=...).json is the schema of a function",
    "rllm.parser.QwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.DeepseekQwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.LlamaChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.chat_template_parser.QwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.chat_template_parser.DeepseekQwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.chat_template_parser.LlamaChatTemplateParser": _CHAT_PARSER,
    "rllm.rewards.code_utils": "code_reward_fn runs the tests of a task in the sandbox",
    "rllm.rewards.math_utils": "math_reward_fn(...) has .is_correct and .metadata['extracted']",
    "rllm.workflows.TimingTrackingMixin": _TIMING,
    "rllm.workflows.timing_mixin": _TIMING,
    "rllm.workflows.EvalProtocolWorkflow": "write a Workflow of your own",
    "rllm.workflows.eval_protocol_workflow": "write a Workflow of your own",
    "rllm.workflows.DistillationWorkflow": "use algorithm.name=distill with teacher.path",
    "rllm.workflows.distillation_workflow": "use algorithm.name=distill with teacher.path",
    "rllm.workflows.store": "keep what episodes share in an object of your own, in workflow_args",
    "rllm.trainer.verl": "use AgentTrainer(backend='verl')",
    "rllm.trainer.tinker": _BACKENDS,
    "rllm.trainer.fireworks": _BACKENDS,
    "rllm.trainer.distill": "use algorithm.name=distill with teacher.path",
    "rllm.trainer.algorithms": "an algorithm of your own is algorithm.name=package.module:Name",
    "rllm.trainer.unified_trainer": _TRAINER,
    "rllm.data.prepare_hendrycks_math": "run python -m rllm.data.prepare_math",
    "rllm.data.utils": _DATASET,
    "rllm.data.dataset_types": _DATASET,
    "rllm.data.TrainDataset": _DATASET,
    "rllm.data.TestDataset": _DATASET,
    "rllm.data.Problem": _DATASET,
    "rllm.data.DatasetConfig": _DATASET,
    "rllm.data.dataloader": "AgentTrainer shuffles by itself, and goes on where it was: resume=True",
    "rllm.data.StatefulTaskDataLoader": "AgentTrainer shuffles by itself, and goes on where it was: resume=True",
    "rllm.eval": "use `rllm eval`, with reward functions of rllm.rewards",
    "rllm.experimental": _TRAINER,
    "rllm.misc": "what is to be told goes to logging",
    "rllm.utils.tracking": "name the trackers: trackers=[console,wandb]",
    "rllm.utils.episode_logger": _EPISODE_LOG,
    "rllm.rollout": _FUNCTION,
    "rllm.evaluator": "give `rllm train` and `rllm eval` a --reward",
    "rllm.Task": "a task is a dict",
}
"""Modules and names, and what to use."""


class GoneFinder:
    """The last entry of `sys.meta_path`: it is asked for modules, and for names of packages, that nobody else has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """
        Raises:
            ModuleNotFoundError: for what is gone.
        """
        if name in GONE:
            _tell(name)


def gone_names(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module that is no package (PEP 562), whose names no finder is asked for."""

    def get(name: str) -> Any:
        if f"{module}.{name}" in GONE:
            _tell(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def _tell(name: str) -> NoReturn:
    # Without `name=`, which would have `from package import name` leave it at that the name cannot be imported.
    raise ModuleNotFoundError(f"{name} of the rLLM framework is not here: {GONE[name]}; see docs/upstream.md")
