"""Classes, short class names and functions that scripts of the rLLM framework use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rllm.agents.agent import BaseAgent
from rllm.agents.chat_agent import GridWorldAgent, MathAgent
from rllm.agents.tool_agent import ToolAgent
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import ConfigError, counted
from rllm.store.codec import readable_json
from rllm.types import TASK_ID_FIELDS, Trajectory
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


@dataclass(frozen=True, kw_only=True)
class PassAtK:
    """Result of `compute_pass_at_k`; `str()` gives one line."""

    pass_at_1: float
    """Share of correct rollouts."""
    pass_at_k: float
    """Share of tasks that at least one rollout solved."""
    k: int
    """Largest number of rollouts of one task."""
    num_tasks: int
    num_rollouts: int
    num_unscored: int
    """Rollouts without a reward, which do not count as correct."""

    def __str__(self) -> str:
        unscored = f", {self.num_unscored} of them without a reward" if self.num_unscored else ""
        return (
            f"pass@1 {self.pass_at_1:.1%}, pass@{self.k} {self.pass_at_k:.1%} "
            f"({counted(self.num_tasks, 'task')}, {counted(self.num_rollouts, 'rollout')}{unscored})"
        )


def compute_pass_at_k(results: Sequence[Trajectory]) -> PassAtK:
    """Return and print pass@1 and pass@k of trajectories of any number of tasks.

    A trajectory is correct if its reward is above 0.

    Trajectories belong to one task if their tasks have the same `task_id` or `id`, or else the same content.

    Raises:
        ConfigError: if there are none, or one is not a trajectory.
    """
    by_task: dict[bytes, list[float | None]] = {}
    for item in results:
        if not isinstance(item, Trajectory):
            raise ConfigError(f"compute_pass_at_k takes trajectories, and this is {type(item).__name__}: {item!r:.80}")
        own = item.task if isinstance(item.task, Mapping) else {}
        named = next((own[name] for name in TASK_ID_FIELDS if own.get(name) is not None), None)
        key = readable_json(item.task if named is None else {"id": named}, sort_keys=True)
        by_task.setdefault(key, []).append(item.final_reward())
    if not by_task:
        raise ConfigError("compute_pass_at_k: there are no trajectories")
    correct = {key: sum(1 for reward in rewards if (reward or 0) > 0) for key, rewards in by_task.items()}
    rewards = [reward for of_task in by_task.values() for reward in of_task]
    found = PassAtK(
        pass_at_1=sum(correct.values()) / len(rewards),
        pass_at_k=fmean(float(count > 0) for count in correct.values()),
        k=max(map(len, by_task.values())),
        num_tasks=len(by_task),
        num_rollouts=len(rewards),
        num_unscored=sum(reward is None for reward in rewards),
    )
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
