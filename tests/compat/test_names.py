"""Names that users of the rLLM framework import: the table of docs/upstream.md, row by row."""

from __future__ import annotations

import importlib
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from rllm.compat.import_hook import REMOVED

TABLE = Path(__file__).parents[2] / "docs" / "upstream.md"
ROWS = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)`(?: as `(\w+)`)? \|$", TABLE.read_text(), re.MULTILINE)
PATHS = sorted({path for remedy in REMOVED.values() for path in re.findall(r"rllm(?:\.\w+)+", remedy)})

PUBLISHED = """
rllm: BaseAgent Action Step Trajectory Episode
rllm.sdk: trajectory Trace StepView TrajectoryView ContextVarSession SessionContext SessionBuffer
  SessionBufferProtocol get_current_metadata get_current_session get_current_session_name get_chat_client
  get_chat_client_async session InMemorySessionTracer SqliteTracer TracerProtocol
rllm.sdk.shortcuts: get_chat_client get_chat_client_async session
rllm.sdk.context: trajectory
rllm.sdk.protocol: Trace StepView TrajectoryView LLMInput LLMOutput trace_to_step_view
rllm.sdk.session: ContextVarSession SessionContext SessionProtocol get_current_session get_current_metadata
  get_current_session_name get_active_session_uids wrap_with_session_context OpenTelemetrySession otel_session
rllm.sdk.session.contextvar: ContextVarSession get_current_session get_active_session_uids
rllm.sdk.session.base: SessionProtocol wrap_with_session_context
rllm.sdk.session.opentelemetry: OpenTelemetrySession otel_session configure_default_tracer
rllm.sdk.session.session_buffer: SessionBuffer
rllm.sdk.chat: TrackedChatClient TrackedAsyncChatClient ProxyTrackedChatClient OpenTelemetryTrackedChatClient
  OpenAIOTelClient AsyncOpenAIOTelClient
rllm.sdk.chat.openai: TrackedChatClient AsyncTrackedChatClient
rllm.sdk.data_process: build_llm_io trace_to_model_output trace_to_step group_steps
rllm.sdk.proxy: ProxyManager VerlProxyManager MetadataRoutingMiddleware TracingCallback SamplingParametersCallback
rllm.sdk.proxy.metadata_slug: assemble_routing_metadata encode_metadata_slug decode_metadata_slug
  build_proxied_base_url extract_metadata_from_path
rllm.sdk.proxy.middleware: MetadataRoutingMiddleware
rllm.sdk.proxy.litellm_callbacks: SamplingParametersCallback TracingCallback
rllm.sdk.proxy.litellm_server: main
rllm.sdk.proxy.proxy_manager: ProxyManager VerlProxyManager
rllm.sdk.store: SqliteTraceStore
rllm.sdk.store.sqlite_store: SqliteTraceStore TraceContext
rllm.sdk.tracers: InMemorySessionTracer SqliteTracer TracerProtocol
rllm.patches.vllm_instrumentation: instrument_vllm check_vllm_instrumentation_status get_vllm_token_ids_support
rllm.agents: BaseAgent MathAgent ToolAgent MCPToolAgent CompetitionCodingAgent SWEAgent MiniWobAgent WebArenaAgent
  FrozenLakeAgent Action Step Trajectory
rllm.agents.agent: BaseAgent Action Step Trajectory Episode
rllm.agents.math_agent: MathAgent
rllm.agents.tool_agent: ToolAgent MCPToolAgent
rllm.agents.code_agent: CompetitionCodingAgent
rllm.agents.frozenlake_agent: FrozenLakeAgent
rllm.agents.swe_agent: SWEAgent
rllm.agents.webarena_agent: WebArenaAgent
rllm.agents.system_prompts: SYSTEM_PROMPT
rllm.environments: BaseEnv SingleTurnEnvironment MultiTurnEnvironment ToolEnvironment FrozenLakeEnv
  CompetitionCodingEnv SWEEnv BrowserGymEnv
rllm.environments.base.base_env: BaseEnv
rllm.environments.base.multi_turn_env: MultiTurnEnvironment
rllm.environments.base.single_turn_env: SingleTurnEnvironment
rllm.environments.tools.tool_env: ToolEnvironment
rllm.environments.tools.mcp_env: MCPEnvironment MCPConnectionManager
rllm.environments.frozenlake.frozenlake: FrozenLakeEnv
rllm.environments.frozenlake: FrozenLakeEnv
rllm.environments.code.competition_coding: CompetitionCodingEnv
rllm.environments.swe.swe: SWEEnv
rllm.environments.browsergym.browsergym: BrowserGymEnv
rllm.environments.env_utils: compute_trajectory_reward compute_mc_return parallel_task_manager
rllm.tools: PythonInterpreter tool_registry ToolRegistry GoogleSearchTool FirecrawlTool TavilySearchTool
  TavilyExtractTool Tool MultiTool
rllm.tools.tool_base: Tool ToolCall ToolOutput
rllm.tools.multi_tool: MultiTool
rllm.tools.registry: ToolRegistry tool_registry
rllm.tools.mcp_tool: MCPTool
rllm.tools.code_tools: PythonInterpreter
rllm.tools.code_tools.python_interpreter: PythonInterpreter
rllm.tools.web_tools: GoogleSearchTool
rllm.tools.utils: function_to_dict
rllm.parser: ChatTemplateParser QwenChatTemplateParser DeepseekQwenChatTemplateParser LlamaChatTemplateParser
  ToolParser QwenToolParser R1ToolParser get_tool_parser
rllm.parser.tool_parser: ToolParser QwenToolParser R1ToolParser get_tool_parser
rllm.parser.chat_template_parser: ChatTemplateParser QwenChatTemplateParser DeepseekQwenChatTemplateParser
  LlamaChatTemplateParser
rllm.rewards: RewardConfig RewardInput RewardOutput RewardType RewardMathFn RewardCodeFn RewardSearchFn
  RewardFunction math_reward_fn search_reward_fn code_reward_fn f1_reward_fn zero_reward
rllm.rewards.reward_types: RewardConfig RewardInput RewardOutput RewardType
rllm.rewards.reward_fn: math_reward_fn search_reward_fn code_reward_fn f1_reward_fn zero_reward RewardFunction
  RewardConfig RewardInput RewardOutput RewardMathFn RewardCodeFn RewardSearchFn Action
rllm.rewards.math_reward: RewardMathFn RewardConfig RewardInput RewardOutput RewardType
rllm.rewards.countdown_reward: countdown_reward_fn compute_score RewardConfig RewardInput RewardOutput
rllm.rewards.search_reward: RewardSearchFn RewardConfig RewardInput RewardOutput RewardType
rllm.rewards.code_reward: RewardCodeFn RewardConfig RewardInput RewardOutput RewardType
rllm.rewards.math_utils.utils: grade_answer_mathd grade_answer_sympy extract_answer
rllm.rewards.math_utils: grade_answer_mathd
rllm.engine: AgentExecutionEngine AsyncAgentExecutionEngine AgentWorkflowEngine AgentSdkEngine ModelOutput
  OpenAIEngine RolloutEngine VerlEngine UnifiedWorkflowEngine TinkerEngine
rllm.engine.agent_execution_engine: AgentExecutionEngine AsyncAgentExecutionEngine
rllm.engine.agent_workflow_engine: AgentWorkflowEngine
rllm.engine.agent_sdk_engine: AgentSdkEngine
rllm.engine.rollout: ModelOutput OpenAIEngine RolloutEngine VerlEngine TinkerEngine Completer
rllm.engine.rollout.rollout_engine: ModelOutput RolloutEngine
rllm.engine.rollout.openai_engine: OpenAIEngine ModelOutput RolloutEngine
rllm.engine.rollout.verl_engine: VerlEngine
rllm.engine.rollout.tinker_engine: TinkerEngine
rllm.workflows: Workflow TerminationEvent TerminationReason SimpleWorkflow SingleTurnWorkflow MultiTurnWorkflow
  CumulativeWorkflow TimingTrackingMixin EvalProtocolWorkflow
rllm.workflows.workflow: Workflow TerminationEvent TerminationReason Episode Trajectory
rllm.workflows.simple_workflow: SimpleWorkflow SimpleAgent
rllm.workflows.single_turn_workflow: SingleTurnWorkflow
rllm.workflows.multi_turn_workflow: MultiTurnWorkflow
rllm.workflows.cumulative_workflow: CumulativeWorkflow
rllm.workflows.timing_mixin: TimingTrackingMixin
rllm.workflows.distillation_workflow: DistillationWorkflow
rllm.workflows.eval_protocol_workflow: EvalProtocolWorkflow
rllm.trainer: AgentTrainer AgentSFTTrainer
rllm.trainer.agent_trainer: AgentTrainer
rllm.trainer.agent_sft_trainer: AgentSFTTrainer
rllm.trainer.env_agent_mappings: ENV_CLASS_MAPPING AGENT_CLASS_MAPPING WORKFLOW_CLASS_MAPPING
rllm.trainer.verl.train_agent_ppo: main
rllm.trainer.verl.agent_sdk_trainer: AgentSdkTrainer
rllm.trainer.verl.agent_ppo_trainer: AgentPPOTrainer
rllm.trainer.tinker.tinker_data_processor: TrajectoryGroup
rllm.data: Dataset DatasetRegistry TrainDataset TestDataset Problem DatasetConfig
rllm.data.dataset: Dataset DatasetRegistry
rllm.data.dataset_types: TrainDataset TestDataset Problem DatasetConfig
rllm.data.utils: load_dataset
rllm.data.dataloader: StatefulTaskDataLoader
rllm.utils: compute_pass_at_k save_trajectories
rllm.utils.tracking: Tracking
rllm.utils.episode_logger: EpisodeLogger
rllm.globals: THOUGHT_DELIMITER_START THOUGHT_DELIMITER_END
rllm.misc: colorful_print
rllm.types: Action Step Trajectory Episode TrajectoryGroup Task
rllm.eval: EvalOutput Signal
"""
"""Names that programs for version 0.2.1 import, by module: its own, and those that it imports itself."""
IMPORTS = [
    (module, name)
    for module, names in re.findall(r"^([\w.]+): ((?:[^\n]|\n  )+)$", PUBLISHED, re.MULTILINE)
    for name in names.split()
]


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=[".".join(pair) for pair in IMPORTS])
def test_published_names_are_found_or_explained(module: str, name: str) -> None:
    explained = pytest.raises(ModuleNotFoundError, match="not part of this package")
    removed = any(f"{module}.{name}".startswith(f"{path}.") or f"{module}.{name}" == path for path in REMOVED)
    with explained if removed and not _imports(module, name) else nullcontext():
        exec(f"from {module} import {name}", {})


def _imports(module: str, name: str) -> bool:
    return (module, name) in {(old.rpartition(".")[0], old.rpartition(".")[2]) for old, _, _ in ROWS}


def test_every_row_of_the_table_is_parsed() -> None:
    assert len(ROWS) == TABLE.read_text().count("\n| `") > 70


@pytest.mark.parametrize(("old", "home", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_old_path_gives_the_object_at_its_new_path(old: str, home: str, name: str) -> None:
    module, _, attribute = old.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is getattr(
        importlib.import_module(home), name or attribute
    )


@pytest.mark.parametrize("removed", REMOVED)
def test_removed_import_names_its_replacement(removed: str) -> None:
    package, _, name = removed.rpartition(".")
    with pytest.raises(
        ModuleNotFoundError,
        match=re.escape(f"{removed} of the rLLM framework is not part of this package: {REMOVED[removed]}"),
    ):
        exec(f"from {package} import {name}" if name[0].isupper() else f"import {removed}", {})


@pytest.mark.parametrize("remedy", sorted(set(REMOVED.values())))
def test_removed_names_are_documented(remedy: str) -> None:
    names = [removed.rpartition(".")[2] for removed, text in REMOVED.items() if text == remedy]
    assert any(name in TABLE.read_text() for name in names), names


@pytest.mark.parametrize("path", PATHS)
def test_replacements_exist(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name) or importlib.import_module(path)


def test_unknown_names_fail_as_usual() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'rllm\.nonsense'$"):
        importlib.import_module("rllm.nonsense")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from rllm.sdk.protocol import Nonsense", {})
    assert not hasattr(importlib.import_module("rllm.sdk"), "Nonsense")
