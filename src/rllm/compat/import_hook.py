"""Import hook for module paths of the rLLM framework: moved names resolve, removed names raise with a replacement.

`docs/upstream.md` lists both for users.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_ENGINES = {
    "ModelOutput": "rllm.inference.engine",
    "OpenAIEngine": "rllm.inference.openai_engine",
    "RolloutEngine": "rllm.inference.engine",
}
_FROZEN_LAKE = {"FrozenLakeEnv": "rllm.environments.grid_world:GridWorldEnv"}
_PROXY = {"ProxyManager": "rllm.compat.proxy_manager"}

MOVED: dict[str, dict[str, str]] = {
    "rllm.agents.frozenlake_agent": {"FrozenLakeAgent": "rllm.compat.class_names"},
    "rllm.engine.rollout": _ENGINES,
    "rllm.engine.rollout.openai_engine": _ENGINES,
    "rllm.engine.rollout.rollout_engine": _ENGINES,
    "rllm.environments.frozenlake": _FROZEN_LAKE,
    "rllm.environments.frozenlake.frozenlake": _FROZEN_LAKE,
    "rllm.globals": {
        "THOUGHT_DELIMITER_END": "rllm.parser.reasoning:CLOSE",
        "THOUGHT_DELIMITER_START": "rllm.parser.reasoning:OPEN",
    },
    "rllm.parser.chat_template_parser": {"ChatTemplateParser": "rllm.compat.chat_template_parser"},
    "rllm.sdk.protocol": {
        "StepView": "rllm.types:Step",
        "Trace": "rllm.types",
        "TrajectoryView": "rllm.types:Trajectory",
        "trace_to_step_view": "rllm.types:Step.from_trace",
    },
    "rllm.sdk.proxy": _PROXY,
    "rllm.sdk.proxy.proxy_manager": _PROXY,
    "rllm.sdk.shortcuts": {
        "get_chat_client": "rllm.sdk.client",
        "get_chat_client_async": "rllm.sdk.client",
        "session": "rllm.sdk.context",
    },
    "rllm.tools.registry": dict.fromkeys(("ToolRegistry", "tool_registry"), "rllm.tools.multi_tool"),
    "rllm.trainer.env_agent_mappings": dict.fromkeys(
        ("AGENT_CLASS_MAPPING", "ENV_CLASS_MAPPING", "WORKFLOW_CLASS_MAPPING"), "rllm.compat.class_names"
    ),
    "rllm.utils": {"compute_pass_at_k": "rllm.compat.class_names", "save_trajectories": "rllm.compat.class_names"},
    "rllm.workflows.cumulative_workflow": {"CumulativeWorkflow": "rllm.workflows.multi_turn_workflow"},
    "rllm.workflows.single_turn_workflow": {"SingleTurnWorkflow": "rllm.workflows.multi_turn_workflow"},
}
"""Module path of the rLLM framework -> its names -> the defining module, with `:attribute` if the name differs."""

_SESSION = "import the names from rllm.sdk, such as session and get_current_session"
_CLIENT = "use rllm.sdk.get_chat_client or get_chat_client_async"
_CALLS = "read calls from the store (rllm.store.open_store) or from session(...).llm_calls"
_GATEWAY = "use `rllm gateway`, or rllm.integrations.litellm with a LiteLLM proxy of your own"
_FUNCTION_ENGINE = "use AgentTrainer(agent_run_func=...), with backend='verl' for verl"
_WORKFLOW_ENGINE = "use AgentWorkflowEngine; results come in the order of the tasks"
_COMPLETER = "use OpenAIEngine, or a RolloutEngine of your own"
_BACKENDS = "use AgentTrainer(backend=...) with local or verl"
_TRAINER = "use rllm.trainer.AgentTrainer"
_MCP = "pass the tools of rllm.tools.mcp_tool.mcp_tools to ToolAgent and ToolEnvironment"
_CODING = "use SingleTurnEnvironment with code_reward_fn, and an agent of your own"
_PROGRAM = "run the program itself with rllm.sdk.run_program, or write a BaseEnv"
_PYTHON = "use rllm.tools.python_tool.PythonInterpreter"
_SEARCH = "use rllm.tools.local_search.LocalSearch, an MCP server, or a function of your own"
_CHAT_PARSER = "use ChatTemplateParser.get_parser(tokenizer), which reads the tokenizer's template"
_DATASET = "use rllm.data.Dataset and DatasetRegistry"
_FUNCTION = "pass AgentTrainer a function that returns its reward, agent_run_func=..."
_TIMING = "see the viewer's page Time, or export spans with gateway.otel=true"
_EPISODE_LOG = "use rllm.engine.episode_log.EpisodeLog"

REMOVED = {
    "rllm.sdk.session": _SESSION,
    "rllm.sdk.chat": _CLIENT,
    "rllm.sdk.tracers": _CALLS,
    "rllm.sdk.store": _CALLS,
    "rllm.sdk.SessionBuffer": _CALLS,
    "rllm.sdk.SessionBufferProtocol": _CALLS,
    "rllm.sdk.InMemorySessionTracer": _CALLS,
    "rllm.sdk.SqliteTracer": _CALLS,
    "rllm.sdk.TracerProtocol": _CALLS,
    "rllm.sdk.protocol.LLMInput": "read Trace.messages and Trace.prompt_ids",
    "rllm.sdk.protocol.LLMOutput": "read Trace.response, response_ids, logprobs and finish_reason",
    "rllm.sdk.data_process": "use session(...).steps or Step.from_trace, which carry the tokens",
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
    "rllm.patches": "vLLM 0.10.2 and later return token ids without a patch",
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
    "rllm.agents.system_prompts": "pass system_prompt= to the agent",
    "rllm.agents.utils": "not needed: tokens come from the inference server, never from messages",
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
    "rllm.tools.utils": "use Tool(function=...).json, the schema of a function",
    "rllm.parser.QwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.DeepseekQwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.LlamaChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.chat_template_parser.QwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.chat_template_parser.DeepseekQwenChatTemplateParser": _CHAT_PARSER,
    "rllm.parser.chat_template_parser.LlamaChatTemplateParser": _CHAT_PARSER,
    "rllm.rewards.code_utils": "use code_reward_fn, which runs a task's tests in the sandbox",
    "rllm.rewards.math_utils": "use math_reward_fn(...): .is_correct and .metadata['extracted']",
    "rllm.workflows.TimingTrackingMixin": _TIMING,
    "rllm.workflows.timing_mixin": _TIMING,
    "rllm.workflows.EvalProtocolWorkflow": "write a Workflow of your own",
    "rllm.workflows.eval_protocol_workflow": "write a Workflow of your own",
    "rllm.workflows.DistillationWorkflow": "use algorithm.name=distill with teacher.path",
    "rllm.workflows.distillation_workflow": "use algorithm.name=distill with teacher.path",
    "rllm.workflows.store": "share an object of your own through workflow_args",
    "rllm.trainer.verl": "use AgentTrainer(backend='verl')",
    "rllm.trainer.tinker": _BACKENDS,
    "rllm.trainer.fireworks": _BACKENDS,
    "rllm.trainer.distill": "use algorithm.name=distill with teacher.path",
    "rllm.trainer.algorithms": "name an algorithm of your own: algorithm.name=package.module:Name",
    "rllm.trainer.unified_trainer": _TRAINER,
    "rllm.data.prepare_hendrycks_math": "run python -m rllm.data.prepare math500",
    "rllm.data.utils": _DATASET,
    "rllm.data.dataset_types": _DATASET,
    "rllm.data.TrainDataset": _DATASET,
    "rllm.data.TestDataset": _DATASET,
    "rllm.data.Problem": _DATASET,
    "rllm.data.DatasetConfig": _DATASET,
    "rllm.data.dataloader": "not needed: AgentTrainer shuffles the tasks and resumes with resume=True",
    "rllm.data.StatefulTaskDataLoader": "not needed: AgentTrainer shuffles the tasks and resumes with resume=True",
    "rllm.eval": "use `rllm eval`, with reward functions of rllm.rewards",
    "rllm.experimental": _TRAINER,
    "rllm.misc": "use logging",
    "rllm.utils.tracking": "name the trackers: trackers=[console,wandb]",
    "rllm.utils.episode_logger": _EPISODE_LOG,
    "rllm.rollout": _FUNCTION,
    "rllm.evaluator": "pass --reward to `rllm train` and `rllm eval`",
    "rllm.Task": "a task is a dict",
}
"""Module or name of the rLLM framework, and what to use instead."""


class CompatFinder:
    """Last entry of `sys.meta_path`: finds the modules of `MOVED` and explains those of `REMOVED`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a moved module, or `None` for a module that this table does not know.

        Raises:
            ModuleNotFoundError: if the module, or the name of a package, was removed.
        """
        if name in REMOVED:
            # Without `name=`, which would make `from package import name` drop this message.
            raise ModuleNotFoundError(
                f"{name} of the rLLM framework is not here: {REMOVED[name]}; see docs/upstream.md"
            )
        return spec_from_loader(name, _MovedLoader(), is_package=True) if name in MOVED else None


class _MovedLoader(Loader):
    """Loader of modules whose names live elsewhere.

    They are packages, so that imports of their removed submodules reach the finder too.
    """

    def create_module(self, spec: ModuleSpec) -> None:
        """Return `None`: the default module is right."""

    def exec_module(self, module: ModuleType) -> None:
        names = MOVED[module.__name__]

        def get(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            home, _, attribute = names[name].partition(":")
            value: Any = import_module(home)
            for part in (attribute or name).split("."):
                value = getattr(value, part)
            return value

        module.__doc__ = "Names of the rLLM framework that live elsewhere; see docs/upstream.md."
        module.__dict__.update({"__getattr__": get, "__dir__": lambda: sorted(names), "__all__": sorted(names)})


def install() -> None:
    """Append the finder to `sys.meta_path`, once."""
    if CompatFinder not in sys.meta_path:
        sys.meta_path.append(CompatFinder)
