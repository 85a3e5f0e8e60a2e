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
    "rllm.agents.math_agent": {"MathAgent": "rllm.agents.chat_agent"},
    "rllm.engine.rollout": _ENGINES,
    "rllm.engine.rollout.openai_engine": _ENGINES,
    "rllm.engine.rollout.rollout_engine": _ENGINES,
    "rllm.environments.base.single_turn_env": {"SingleTurnEnvironment": "rllm.environments.base.multi_turn_env"},
    "rllm.environments.frozenlake": _FROZEN_LAKE,
    "rllm.environments.frozenlake.frozenlake": _FROZEN_LAKE,
    "rllm.globals": {
        "THOUGHT_DELIMITER_END": "rllm.parser.decoding:CLOSE",
        "THOUGHT_DELIMITER_START": "rllm.parser.decoding:OPEN",
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

_INSTEAD = {
    "import the names from rllm.sdk, such as session and get_current_session": "sdk.session",
    "use rllm.sdk.get_chat_client or get_chat_client_async": "sdk.chat",
    "read calls from the store (rllm.store.open_store) or from session(...).llm_calls": (
        "sdk.tracers sdk.store sdk.SessionBuffer sdk.SessionBufferProtocol sdk.InMemorySessionTracer "
        "sdk.SqliteTracer sdk.TracerProtocol"
    ),
    "read Trace.messages and Trace.prompt_ids": "sdk.protocol.LLMInput",
    "read Trace.response, response_ids, logprobs and finish_reason": "sdk.protocol.LLMOutput",
    "use session(...).steps or Step.from_trace, which carry the tokens": "sdk.data_process",
    "use `rllm gateway`, or rllm.integrations.litellm with a LiteLLM proxy of your own": (
        "sdk.proxy.metadata_slug sdk.proxy.middleware sdk.proxy.MetadataRoutingMiddleware "
        "sdk.proxy.SamplingParametersCallback sdk.proxy.TracingCallback sdk.proxy.litellm_callbacks "
        "sdk.proxy.litellm_server sdk.proxy.VerlProxyManager sdk.proxy.proxy_manager.VerlProxyManager"
    ),
    "use AgentTrainer(agent_run_func=...), with backend='verl' for verl": (
        "engine.AgentSdkEngine engine.agent_sdk_engine engine.VerlEngine engine.rollout.VerlEngine "
        "engine.rollout.verl_engine"
    ),
    "use AgentTrainer(backend=...) with local or verl": (
        "engine.rollout.TinkerEngine engine.rollout.tinker_engine engine.TinkerEngine trainer.tinker trainer.fireworks"
    ),
    "use OpenAIEngine, or a RolloutEngine of your own": (
        "engine.rollout.Completer engine.rollout.TITOCompleter engine.rollout.completer"
    ),
    "use AgentWorkflowEngine; results come in the order of the tasks": (
        "engine.UnifiedWorkflowEngine engine.unified_workflow_engine"
    ),
    "vLLM 0.10.2 and later return token ids without a patch": "patches",
    "pass the tools of rllm.tools.mcp_tool.mcp_tools to ToolAgent and ToolEnvironment": (
        "agents.MCPToolAgent agents.tool_agent.MCPToolAgent environments.tools.mcp_env"
    ),
    "use SingleTurnEnvironment with code_reward_fn, and an agent of your own": (
        "agents.CompetitionCodingAgent agents.code_agent environments.CompetitionCodingEnv environments.code"
    ),
    "run the program itself with rllm.sdk.run_program, or write a BaseEnv": (
        "agents.SWEAgent agents.swe_agent agents.MiniWobAgent agents.miniwob_agent agents.WebArenaAgent "
        "agents.webarena_agent agents.appworld_react_agents environments.SWEEnv environments.swe "
        "environments.BrowserGymEnv environments.browsergym environments.appworld"
    ),
    "pass system_prompt= to the agent": "agents.system_prompts",
    "not needed: tokens come from the inference server, never from messages": "agents.utils",
    "use trajectory.final_reward() and step.mc_return": "environments.env_utils",
    "use rllm.tools.python_tool.PythonInterpreter": "tools.PythonInterpreter tools.code_tools",
    "use rllm.tools.local_search.LocalSearch, an MCP server, or a function of your own": (
        "tools.web_tools tools.GoogleSearchTool tools.FirecrawlTool tools.TavilySearchTool tools.TavilyExtractTool"
    ),
    "use Tool(function=...).json, the schema of a function": "tools.utils",
    "use ChatTemplateParser.get_parser(tokenizer), which reads the tokenizer's template": (
        "parser.QwenChatTemplateParser parser.DeepseekQwenChatTemplateParser parser.LlamaChatTemplateParser "
        "parser.chat_template_parser.QwenChatTemplateParser "
        "parser.chat_template_parser.DeepseekQwenChatTemplateParser "
        "parser.chat_template_parser.LlamaChatTemplateParser"
    ),
    "use code_reward_fn, which runs a task's tests in the sandbox": "rewards.code_utils",
    "use math_reward_fn(...): .is_correct and .metadata['extracted']": "rewards.math_utils",
    "see the viewer's page Time, or export spans with gateway.otel=true": (
        "workflows.TimingTrackingMixin workflows.timing_mixin"
    ),
    "write a Workflow of your own": "workflows.EvalProtocolWorkflow workflows.eval_protocol_workflow",
    "use algorithm.name=distill with teacher.path": (
        "workflows.DistillationWorkflow workflows.distillation_workflow trainer.distill"
    ),
    "share an object of your own through workflow_args": "workflows.store",
    "use AgentTrainer(backend='verl')": "trainer.verl",
    "name an algorithm of your own: algorithm.name=package.module:Name": "trainer.algorithms",
    "use rllm.trainer.AgentTrainer": "trainer.unified_trainer experimental",
    "run python -m rllm.data.prepare hendrycks_math, or math500": "data.prepare_hendrycks_math",
    "use rllm.data.Dataset and DatasetRegistry": (
        "data.utils data.dataset_types data.TrainDataset data.TestDataset data.Problem data.DatasetConfig"
    ),
    "not needed: AgentTrainer shuffles the tasks and resumes with resume=True": (
        "data.dataloader data.StatefulTaskDataLoader"
    ),
    "use `rllm eval`, with reward functions of rllm.rewards": "eval",
    "use logging": "misc",
    "name the trackers: trackers=[console,wandb]": "utils.tracking",
    "use rllm.engine.episode_log.EpisodeLog": "utils.episode_logger",
    "pass AgentTrainer a function that returns its reward, agent_run_func=...": "rollout",
    "pass --reward to `rllm train` and `rllm eval`": "evaluator",
    "a task is a dict": "Task",
}
"""Replacements of modules and names of the rLLM framework, each below `rllm`."""

REMOVED = {f"rllm.{name}": instead for instead, names in _INSTEAD.items() for name in names.split()}
"""Module or name of the rLLM framework, and what to use instead."""


class CompatFinder:
    """Last entry of `sys.meta_path`: finds the modules in `MOVED` and explains the modules in `REMOVED`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a moved module, or `None` for a module that this table does not know.

        Raises:
            ModuleNotFoundError: if the module, or the name of a package, was removed.
        """
        if name in REMOVED:
            # Without `name=`, which would make `from package import name` drop this message.
            raise ModuleNotFoundError(
                f"{name} of the rLLM framework is not part of this package: {REMOVED[name]}; see docs/upstream.md"
            )
        return spec_from_loader(name, _MovedLoader(), is_package=True) if name in MOVED else None


class _MovedLoader(Loader):
    """Loader of modules whose names live elsewhere.

    They are packages, so that imports of their removed submodules reach the finder too.
    """

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
