"""`Workflow`: a rollout of any shape, with several agents, several attempts, or both, written as one coroutine.

    class SolverJudge(Workflow):
        async def run(self, task, uid, **kwargs):
            answer = await self.rollout_engine.get_model_response([{"role": "user", "content": task["question"]}])
            ...
            self.commit("solver", trajectory=Trajectory(steps=[Step.from_model_output(answer, messages)], reward=1.0))

An object runs one task at a time, and is used again for others after `reset`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from rllm._runtime.threads import in_thread
from rllm.agents.agent import BaseAgent
from rllm.capture import snapshot
from rllm.errors import (
    AgentError,
    ConfigError,
    PromptTooLongError,
    RolloutTimeout,
    StoreError,
    TokenMismatchError,
    shown,
    ungrouped,
)
from rllm.inference.engine import InferenceEngine
from rllm.registry import did_you_mean
from rllm.rewards.scoring import is_number
from rllm.types import Episode, Task, TerminationReason, Trajectory, discounted, grouped, is_scored

__all__ = ["TerminationEvent", "TerminationReason", "Workflow"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

_use: ContextVar[tuple[object, int]] = ContextVar("rllm_workflow_use", default=(None, 0))
"""A workflow and the number of its use: a task that outlives one use must not change the next."""


class TerminationEvent(Exception):
    """Raised inside `run` to end the episode here; what was done so far counts."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Workflow(ABC):
    """Base class of workflows. The engine passes `rollout_engine`; the tokens of its calls are trained on."""

    def __init__(
        self,
        rollout_engine: InferenceEngine | None = None,
        executor: Executor | None = None,
        *,
        timeout: float = 1e6,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Set what all workflows share; subclasses pass these arguments on.

        Args:
            rollout_engine: the model; `None` for a workflow with clients of its own.
            executor: runs functions of `run_in_executor`; by default an unlimited number of threads.
            timeout: seconds after which `run` is cancelled, with reason TIMEOUT.
            gamma: discount of the returns that replace the rewards of steps; 0 leaves rewards unchanged.
            reward_bonus_coeff: factor of the increase of the reward since the previous step, added to a step's reward.
            **kwargs: none is accepted here; a subclass takes its own.

        Raises:
            ConfigError: for an unknown argument.
        """
        if kwargs:
            key = next(iter(kwargs))
            named = {name for kind in type(self).__mro__ for name in inspect.signature(kind).parameters}
            meant = did_you_mean(key, named - {"args", "kwargs"}) or "see its __init__"
            raise ConfigError(f"{type(self).__name__} takes no argument {key!r}: {meant}")
        # The static type assumes an engine; without one, calling it fails at the call.
        self.rollout_engine: InferenceEngine = rollout_engine  # type: ignore[assignment]
        self.executor = executor
        self.timeout = timeout
        self.gamma = gamma
        self.reward_bonus_coeff = reward_bonus_coeff
        self.uid = ""
        self.task: Task = {}
        self.error: Exception | None = None
        """Error raised by `run`, or a hook after it, in the last rollout."""
        self._completed: list[Trajectory] = []
        self._postprocessed: Episode | None = None
        self._num_uses = 0

    @abstractmethod
    async def run(self, task: Task, uid: str, **kwargs: Any) -> Episode | None:
        """Run one rollout of the task.

        Returns:
            the episode; or `None` for one with the trajectories that `collect_trajectories` returns.

        Raises:
            TerminationEvent: to end here.
        """

    @staticmethod
    def is_multithread_safe() -> bool:
        """Return whether several objects of this class may be used at once; if not, the engine uses one."""
        return True

    async def run_with_termination_handling(self, task: Task, uid: str, **kwargs: object) -> Episode:
        """Run and postprocess; returns an episode however the run ends, unless it is cancelled from outside.

        A `TerminationEvent` sets its own reason, a prompt that is too long MAX_PROMPT_LENGTH_EXCEEDED, a timeout
        TIMEOUT, and any other exception ERROR. After a timeout, an error, or a too long first prompt, `info["error"]`
        has type, message and traceback.

        Raises:
            TokenMismatchError: if captured tokens contradict each other.
            StoreError: if the trace store fails.
        """
        returned: Any = None
        reason, too_long = TerminationReason.ENV_DONE, None
        self.error = self._postprocessed = None
        try:
            async with asyncio.timeout(self.timeout if self.timeout < 1e6 else None) as deadline:
                with ungrouped():
                    returned = await self.run(task, uid, **kwargs)
        except TerminationEvent as event:
            reason = event.reason
            if reason is TerminationReason.ERROR:
                self.error = AgentError(f"{type(self).__name__}.run ended itself with {event.reason}")
        except PromptTooLongError as raised:
            reason, too_long = TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, raised
        except TimeoutError as raised:
            reason, self.error = TerminationReason.ERROR, raised
            if deadline.expired():
                reason = TerminationReason.TIMEOUT
                self.error = RolloutTimeout(
                    f"{type(self).__name__}.run did not finish within timeout={self.timeout:g} seconds"
                )
        except (TokenMismatchError, StoreError):
            raise  # captured data cannot be trusted, which concerns the whole run
        except Exception as raised:
            reason, self.error = TerminationReason.ERROR, raised
        try:
            return self._finished(returned, reason, too_long)
        except Exception as raised:
            self.error = raised
            return _with_error(Episode(task=task), raised)

    def _finished(self, returned: object, reason: TerminationReason, too_long: Exception | None) -> Episode:
        """Postprocess the episode, unless `run` has done so: rewards must not be discounted twice."""
        if returned is None:
            episode = self.collect_trajectories()
        elif isinstance(returned, Episode):
            episode = returned
        else:
            raise AgentError(
                f"{type(self).__name__}.run returned {returned!r:.100} of type {type(returned).__name__}: return an "
                "Episode, or None after self.commit(name, trajectory=...)"
            )
        if episode is self._postprocessed:
            return episode
        if not episode.trajectories:
            self.error = self.error or too_long
        return self.postprocess_episode(episode, reason, self.error)

    def commit(
        self,
        name: str | None = None,
        agent: BaseAgent | None = None,
        trajectory: Trajectory | None = None,
        reset: bool = False,
    ) -> None:
        """Add a copy of an agent's trajectory, or of this one, to the episode.

        Args:
            name: role of the trajectory; by default its own name.
            agent: the agent whose trajectory it is.
            trajectory: or the trajectory itself.
            reset: reset the agent for its next attempt.

        Raises:
            AgentError: if its reward is not a number.
        """
        if (agent is None) == (trajectory is None):
            raise ValueError("commit: pass either an agent or a trajectory")
        user, number = _use.get()
        if user is self and number != self._num_uses:
            logger.warning(
                "%s: a task that has outlived its rollout committed %r, which is ignored: await it inside run",
                type(self).__name__,
                name,
            )
            return
        source = agent.trajectory if agent is not None else trajectory
        assert source is not None
        kept = _copy_now(source)
        kept.name = name or kept.name
        if is_scored(kept.reward) and not is_number(kept.reward):
            raise AgentError(
                f"{type(self).__name__}.commit was given {shown(kept.reward)} as the reward of {kept.name!r}: "
                "use a number, or None for 'not scored'"
            )
        if kept.steps:
            self._completed.append(kept)
        else:
            logger.warning("%s: the trajectory %r has no steps, so it is ignored", type(self).__name__, kept.name)
        if agent is not None and reset:
            agent.reset()

    def collect_trajectories(self) -> Episode:
        """Return committed trajectories, and uncommitted ones of agents in public attributes."""
        committed = {trajectory.uid for trajectory in self._completed}
        collected = list(self._completed)
        for name, value in vars(self).items():
            if name.startswith("_") or not isinstance(value, BaseAgent):
                continue
            trajectory = value.trajectory
            if trajectory.steps and trajectory.uid not in committed:
                own = _copy_now(trajectory)
                own.name = name if own.name == "agent" else own.name
                collected.append(own)
        return Episode(trajectories=collected)

    def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
        """Set the trajectory's reward: its own, or else the sum of its steps' rewards. Override to change that."""
        reward = trajectory.final_reward()
        if reward is not None:
            trajectory.reward = reward

    def adjust_step_rewards(self, trajectory: Trajectory) -> None:
        """Shape the rewards of scored steps by `reward_bonus_coeff` and `gamma`. Override to change that."""
        if not any(is_scored(step.reward) for step in trajectory.steps):
            return
        raw = [float(step.reward or 0.0) for step in trajectory.steps]
        if self.reward_bonus_coeff > 0.0:
            for step, before, now in zip(trajectory.steps[1:], raw, raw[1:], strict=False):
                step.reward = now + self.reward_bonus_coeff * (now - before)
        if self.gamma > 0.0:
            rewards = [float(step.reward or 0.0) for step in trajectory.steps]
            for step, value in zip(trajectory.steps, discounted(rewards, self.gamma), strict=True):
                step.reward = value

    def assign_episode_correctness(self, episode: Episode) -> None:
        """Mark the episode correct if the trajectories' rewards sum to more than 0. Override to change that."""
        rewards = [trajectory.final_reward() for trajectory in episode.trajectories]
        episode.is_correct = sum(reward for reward in rewards if reward is not None) > 0

    def collect_metrics(self, episode: Episode) -> None:
        """Add `<name>_acc`, the mean reward of each role, unless the episode has it. Override to add others."""
        known = ((path.name, path.final_reward()) for path in episode.trajectories)
        by_name = grouped((name, reward) for name, reward in known if reward is not None)
        found = {f"{name}_acc": sum(rewards) / len(rewards) for name, rewards in by_name.items()}
        episode.metrics = {**found, **episode.metrics}

    def postprocess_episode(
        self, episode: Episode, termination_reason: TerminationReason | None = None, error: Exception | None = None
    ) -> Episode:
        """Fill in task, rewards, correctness, metrics and termination reason; values of the episode itself stay."""
        episode.task = self.task if episode.task is None else episode.task
        for trajectory in episode.trajectories:
            self.compute_trajectory_reward(trajectory)
            self.adjust_step_rewards(trajectory)
        if episode.is_correct is None:
            self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        episode.termination_reason = episode.termination_reason or termination_reason
        if error is not None:
            _with_error(episode, error)
        self._postprocessed = episode
        return episode

    def reset(self, task: Task | None = None, uid: str | None = None) -> None:
        """Clear the previous rollout; agents in public attributes are reset too."""
        self.uid = uid or ""
        self.task = task or {}
        self._completed = []
        self._num_uses += 1
        _use.set((self, self._num_uses))
        for name, value in vars(self).items():
            if not name.startswith("_") and isinstance(value, BaseAgent):
                value.reset()

    async def run_in_executor(self, fn: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call a blocking function in a thread, in the current session.

        An `async` function, such as `step` of some environments, is awaited.
        """
        call = partial(fn, *args, **kwargs)
        if self.executor is None:
            returned = await in_thread(call, name=f"{type(self).__name__} {self.uid}")
        else:
            returned = await asyncio.get_running_loop().run_in_executor(self.executor, call)
        return await returned if inspect.isawaitable(returned) else returned


def _copy_now(trajectory: Trajectory) -> Trajectory:
    """Return a copy that is independent of later changes to plain data."""
    copied = _snapshot_of(trajectory)
    copied.steps = [_snapshot_of(step) for step in trajectory.steps]
    return copied


def _snapshot_of(item: T) -> T:
    copied = copy.copy(item)
    vars(copied).update(snapshot(vars(item)))
    return copied


def _with_error(episode: Episode, error: Exception) -> Episode:
    timed_out = isinstance(error, RolloutTimeout)
    episode.termination_reason = TerminationReason.TIMEOUT if timed_out else TerminationReason.ERROR
    episode.info["error"] = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    return episode
