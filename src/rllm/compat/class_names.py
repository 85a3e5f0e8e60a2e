"""Classes, short class names and functions that scripts of the rLLM framework use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rllm.agents.agent import BaseAgent
from rllm.agents.grid_world_agent import GridWorldAgent
from rllm.agents.math_agent import MathAgent
from rllm.agents.tool_agent import ToolAgent
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.single_turn_env import SingleTurnEnvironment
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import ConfigError, counted
from rllm.evaluation import pass_at_k
from rllm.evaluation.pass_at_k import PassAtK
from rllm.types import Trajectory
from rllm.workflows.multi_turn_workflow import CumulativeWorkflow, MultiTurnWorkflow, SingleTurnWorkflow
from rllm.workflows.simple_workflow import SimpleWorkflow
from rllm.workflows.workflow import Workflow


class FrozenLakeAgent(GridWorldAgent):
    """See `GridWorldAgent`.

    Args:
        max_steps: has no effect: the environment counts the steps.
        use_accumulate_thinking: False leaves earlier turns' thoughts out of prompts.
        use_multistep_prompt: has no effect: there is one prompt.
        use_accumulate_history: must be true: every prompt has all turns.

    Raises:
        ConfigError: if `use_accumulate_history` is false.
    """

    def __init__(
        self,
        max_steps: int | None = None,
        use_accumulate_thinking: bool = True,
        use_multistep_prompt: bool = False,
        use_accumulate_history: bool = True,
    ) -> None:
        if not use_accumulate_history:
            raise ConfigError("use_accumulate_history=False: every prompt has all turns; leave the setting out")
        super().__init__(accumulate_thinking=use_accumulate_thinking)


AGENT_CLASS_MAPPING: dict[str, type[BaseAgent]] = {
    "math_agent": MathAgent,
    "tool_agent": ToolAgent,
    "frozenlakeagent": FrozenLakeAgent,
}
ENV_CLASS_MAPPING: dict[str, type[BaseEnv]] = {
    "math": SingleTurnEnvironment,
    "code": SingleTurnEnvironment,
    "single_turn_env": SingleTurnEnvironment,
    "tool": ToolEnvironment,
    "frozenlake": GridWorldEnv,
}
WORKFLOW_CLASS_MAPPING: dict[str, type[Workflow]] = {
    "simple": SimpleWorkflow,
    "single_turn": SingleTurnWorkflow,
    "multi_turn": MultiTurnWorkflow,
    "cumulative": CumulativeWorkflow,
}


def compute_pass_at_k(results: Sequence[Trajectory]) -> PassAtK:
    """See `rllm.evaluation.pass_at_k.compute_pass_at_k`; the result is also printed."""
    found = pass_at_k.compute_pass_at_k(results)
    print(found)  # noqa: T201
    return found


def save_trajectories(
    results: Sequence[object], save_dir: str | Path = "./trajectories", filename: str = "trajectories.pt"
) -> Path:
    """Write results to a file that `torch.load(path, weights_only=False)` reads; return and print its path."""
    import torch

    path = Path(save_dir, filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(list(results), path)
    print(f"saved {counted(len(results), 'trajectory', 'trajectories')} to {path}")  # noqa: T201
    return path
