"""Calls of reward functions, and validation of their results."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard, TypeVar

from rllm._runtime.threads import in_thread, run_in_own_loop
from rllm.capture import snapshot
from rllm.errors import ConfigError, RewardError, RolloutError, boundary, shown
from rllm.rewards.reward_types import RewardOutput
from rllm.types import TASK_ID_FIELDS, VERDICT_KEY, Episode, JSONMapping, JSONObject, Trajectory, Unscored

MAX_REWARD = 1e30
"""Limit of a metric, whose sums and squares must stay finite in float32's range of exponents."""

ACCEPTED = (
    "a number, {name: number} for several parts, (reward, {metric: number}), a RewardOutput, or None for 'not scored'"
)

PARTS_KEY = "reward_parts"
"""Key of the `info` of an environment's last step for the named parts of its reward."""

METADATA_KEY = "reward_metadata"
"""Key of the `info` of an environment's last step for the metadata of its reward."""

AnyReward: TypeAlias = Callable[..., object]
"""A reward function of a user, sync or async; `as_reward_output` lists what it may return."""
Weights: TypeAlias = Mapping[str, float]
"""Factors on named parts of rewards; those that are not named have 1."""
_F = TypeVar("_F", bound=AnyReward)


def as_reward_output(reward_fn: AnyReward, task: object, action: object) -> RewardOutput:
    """Call `reward_fn(task, action)` and return its result as a `RewardOutput` with a finite reward or `None`.

    A function with parameters named as in `RewardFunction`, `task_info` and `action`, may have them in any order. An
    async function runs in its own event loop; use `score` where a loop is running.

    Named parts are added up, weighted by the function's attribute `weights` if it has one. A part of `None` leaves the
    whole unscored, and the first part decides whether the answer is right.

    Raises:
        RewardError: if the function, which the message names, raises, or returns anything other than
            `float | {name: float} | (reward, metrics) | RewardOutput | None`.
    """
    name = _described(reward_fn, task)
    with boundary(RewardError, name):
        returned = _call(reward_fn, task, action)
        if inspect.isawaitable(returned):
            returned = run_in_own_loop(returned)
    return reward_output(returned, name, weights_of(reward_fn))


async def score(reward_fn: AnyReward, task: object, action: object, *, timeout_s: float | None = None) -> RewardOutput:
    """Return what `as_reward_output` does, with async functions in this event loop and others in a thread.

    Raises:
        RewardError: as `as_reward_output`, and if the function takes longer than `timeout_s`.
    """
    name = _described(reward_fn, task)
    returned = await _awaited(reward_fn, functools.partial(_call, reward_fn, task, action), name, timeout_s)
    return reward_output(returned, name, weights_of(reward_fn))


def group_reward(function: _F) -> _F:
    """Mark a reward function that scores all answers to a task at once.

    It is called with the task and the list of answers of a group when all of its rollouts have ended, and returns a
    list with an item for each, of the kinds that other reward functions return. Failed rollouts are left out. A
    parameter named `trajectories` gets the answers' trajectories, with their messages.
    """
    function.scores_groups = True  # type: ignore[attr-defined]
    return function


def scores_groups(reward_fn: object) -> bool:
    """Return whether a reward function is one of groups; see `group_reward`."""
    return bool(getattr(reward_fn, "scores_groups", False))


async def score_group(
    reward_fn: AnyReward, task: object, trajectories: Sequence[Trajectory], *, timeout_s: float | None = None
) -> list[RewardOutput]:
    """Call a reward function of groups, and return the reward of each trajectory.

    Raises:
        RewardError: if the function, which the message names, raises, takes longer than `timeout_s`, or does not return
            a list with one reward for each.
    """
    name = _described(reward_fn, task)
    more = {"trajectories": list(trajectories)} if "trajectories" in _parameters(reward_fn) else {}
    call = functools.partial(reward_fn, task, [answer_of(path) for path in trajectories], **more)
    returned = await _awaited(reward_fn, call, name, timeout_s)
    if callable(as_list := getattr(returned, "tolist", None)):  # an array or a tensor
        returned = as_list()
    if not isinstance(returned, list | tuple) or len(returned) != len(trajectories):
        raise RewardError(
            f"{name} returned {shown(returned)}: return one reward for each of {len(trajectories)} answers"
        )
    return [reward_output(item, name, weights_of(reward_fn)) for item in returned]


class AddedReward:
    """Reward function of groups that adds another one to the reward of an environment, which is the part `env`."""

    scores_groups = True

    def __init__(self, reward: AnyReward) -> None:
        check_reward(reward)
        self.reward = reward
        self.weights = {"env": 1.0, **weights_of(reward)}
        self.__qualname__ = _name_of(reward)

    def keep_in(self, folder: Path) -> None:
        """Let a judge keep its verdicts in this folder."""
        keep_verdicts(self.reward, folder)

    async def __call__(
        self, task: object, answers: Sequence[object], trajectories: Sequence[Trajectory]
    ) -> list[RewardOutput]:
        """Return the sums; an answer that either of the two leaves unscored, or fails on, is unscored."""
        if scores_groups(self.reward):
            verdicts = await score_group(self.reward, task, trajectories)
        else:
            verdicts = await asyncio.gather(*(self._scored(task, answer) for answer in answers))
        return [self._added(path.final_reward(), verdict) for path, verdict in zip(trajectories, verdicts, strict=True)]

    async def _scored(self, task: object, answer: object) -> RewardOutput:
        try:
            return await score(self.reward, task, answer)
        except RewardError as error:
            return RewardOutput(None, {"error": str(error)})

    def _added(self, env: float | None, verdict: RewardOutput) -> RewardOutput:
        if env is None:
            return RewardOutput(None, {**verdict.metadata, "error": "the environment gave no reward"})
        if verdict.reward is None:
            return replace(verdict, is_correct=env >= 1.0)
        parts = {"env": env, **(verdict.parts or {"reward": verdict.reward})}
        return replace(verdict, reward=env + verdict.reward, is_correct=env >= 1.0, parts=parts)


def answer_of(trajectory: Trajectory) -> object:
    """Return the result of a trajectory: its `output`, or else the model's last text."""
    if trajectory.output is not None:
        return trajectory.output
    return trajectory.steps[-1].model_response if trajectory.steps else ""


async def _awaited(reward_fn: AnyReward, call: Callable[[], object], name: str, timeout_s: float | None) -> object:
    """Return the result of a call: of an async function in this event loop, of any other in a thread."""
    try:
        async with asyncio.timeout(timeout_s):
            with boundary(RewardError, name):
                returned = call() if is_async(reward_fn) else await in_thread(call, name=name)
                return await returned if inspect.isawaitable(returned) else returned
    except TimeoutError as late:
        raise RewardError(
            f"{name} did not finish within {timeout_s:g} s: raise reward.timeout_s if it was merely slow"
        ) from late


def is_async(function: AnyReward) -> bool:
    """Return whether this is a coroutine function, or an object that is called as one."""
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _call(reward_fn: AnyReward, task: object, action: object) -> object:
    """Call a reward function, by name if it has the names by which environments of the rLLM framework do."""
    parameters = _parameters(reward_fn)
    found = [parameters[name] for name in ("task_info", "action") if name in parameters]
    if len(found) == 2 and all(item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) for item in found):
        return reward_fn(task_info=task, action=action)
    return reward_fn(task, action)


def _parameters(function: AnyReward) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _described(reward_fn: AnyReward, task: object) -> str:
    """Return the name of a reward function, and of its task if that has one, for messages."""
    ids = (task.get(name) for name in TASK_ID_FIELDS) if isinstance(task, Mapping) else ()
    task_id = next((value for value in ids if value is not None), None)
    of_task = "" if task_id is None else f" for task {str(task_id)!r}"
    return f"reward function {_name_of(reward_fn)}{of_task}"


def _name_of(reward_fn: AnyReward) -> str:
    return str(getattr(reward_fn, "__qualname__", None) or type(reward_fn).__qualname__)


def reward_output(returned: object, name: str, weights: Weights = MappingProxyType({})) -> RewardOutput:
    """Return the result of a reward function as a `RewardOutput`; see `as_reward_output`.

    Raises:
        RewardError: if it is something else; the message begins with `name`.
    """
    if isinstance(returned, RewardOutput):
        parts = _checked_parts(returned.parts, name)
        return replace(returned, reward=checked_reward(returned.reward, name), parts=parts)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        verdict = reward_output(returned[0], name, weights)
        return replace(verdict, metadata={**verdict.metadata, **returned[1]})
    if isinstance(returned, Mapping) and returned:
        parts = _checked_parts(returned, name)
        if missing := [str(key) for key in returned if str(key) not in parts]:
            return RewardOutput(None, {"error": f"its part {missing[0]!r} is None"}, parts=parts)
        return RewardOutput(weighted_sum(parts, weights), is_correct=next(iter(parts.values())) >= 1.0, parts=parts)
    return RewardOutput(checked_reward(returned, name))


def _checked_parts(parts: Mapping[Any, object], name: str) -> dict[str, float]:
    """Return the scored parts of a reward as floats; raise `RewardError` for one that is not a finite number."""
    checked = {str(key): checked_reward(value, f"{name}, of the part {key!r},") for key, value in parts.items()}
    return {key: value for key, value in checked.items() if value is not None}


def info_of(verdict: RewardOutput) -> JSONObject:
    """Return the entries with which an environment reports a reward in the `info` of its last step."""
    parts = {PARTS_KEY: verdict.parts} if verdict.parts else {}
    return {"is_correct": verdict.is_correct, METADATA_KEY: verdict.metadata, **parts}


def keep_verdicts(reward_fn: object, folder: Path) -> None:
    """Let a judge keep its verdicts in the folder of a run or an evaluation; do nothing for other functions."""
    if callable(keep_in := getattr(reward_fn, "keep_in", None)):
        keep_in(folder)


def weights_of(reward_fn: object) -> Weights:
    """Return the weights that a reward function gives its own parts."""
    return getattr(reward_fn, "weights", None) or MappingProxyType({})


def weighted_sum(parts: Mapping[str, float], weights: Weights) -> float:
    """Return the sum of the parts, each multiplied by its weight."""
    return sum(weights.get(name, 1.0) * value for name, value in parts.items())


def checked_reward(value: object, name: str, error: type[RolloutError] = RewardError) -> float | None:
    """Return a reward as a finite float, or `None` if it is unscored.

    Raises:
        RolloutError: of the type `error`, if it is not a finite number; the message names the function.
    """
    if value is None or isinstance(value, Unscored):
        return None
    if inspect.iscoroutine(value):
        value.close()
        raise error(f"{name} is a coroutine function; use an ordinary function, which is called in a thread")
    if not is_number(value):
        raise error(f"{name} returned {shown(value)} of type {type(value).__name__}: return {ACCEPTED}")
    reward = as_float(value)
    if not math.isfinite(reward):
        raise error(f"{name} returned the reward {reward!r}: return a finite number, or None for 'not scored'")
    return reward


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is a scalar number of Python, NumPy or torch."""
    if isinstance(value, bool | int | float | Decimal | Fraction):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "item") and isinstance(value.item(), int | float)


def as_float(value: float) -> float:
    """Return any number as a float: infinity for one beyond all floats, and NaN for a signalling one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:  # Decimal("sNaN")
        return math.nan


_ADDRESS_PARAMETERS = ("base_url", "session_url")
"""Parameters that give an agent the address of its model."""


def with_reward(
    agent: Callable[..., object], reward: AnyReward, *, timeout_s: float | None = None
) -> Callable[..., Any]:
    """Return a function that runs the agent and scores its answer with `reward(task, answer)`.

    The reward sees the task as it was passed in, without changes made by the agent. It may return anything that
    `as_reward_output` accepts; finite numbers in its metadata become metrics. One of groups (`group_reward`) is called
    by the trainer or the evaluation, when all rollouts of a task have ended.

    Args:
        agent: sync or async function.
        reward: sync or async function. With an async one, or a deadline, the result is awaitable.
        timeout_s: seconds after which a call of the reward fails.

    Raises:
        ConfigError: if the reward cannot be called with a task and an answer.
    """
    check_reward(reward)

    @functools.wraps(agent)
    def run(**task: object) -> object:
        answer = agent(**snapshot(task))
        if inspect.isawaitable(answer):
            return score_later(answer, task)
        if scores_groups(reward):
            return _unscored_episode(answer)
        if is_async(reward) or timeout_s is not None:
            return score_later(answer, task)
        return _episode(as_reward_output(reward, without_address(task), answer), reward, answer)

    async def score_later(answer: object, task: JSONMapping) -> object:
        answer = await answer if inspect.isawaitable(answer) else answer
        if scores_groups(reward):
            return _unscored_episode(answer)
        return _episode(await score(reward, without_address(task), answer, timeout_s=timeout_s), reward, answer)

    @functools.wraps(agent)
    async def run_async(**task: object) -> object:
        return await score_later(agent(**snapshot(task)), task)

    rewarded = run_async if inspect.iscoroutinefunction(agent) else run
    vars(rewarded)[_REWARD] = reward
    return rewarded


_REWARD = "_rllm_reward"
"""Attribute of a function made by `with_reward`."""


def reward_function_of(agent: object) -> AnyReward | None:
    """Return the reward function that an agent was given by `with_reward`."""
    found: AnyReward | None = getattr(agent, _REWARD, None)
    return found


def with_deadline(agent: Callable[..., Any], timeout_s: float | None) -> Callable[..., Any]:
    """Return an agent made by `with_reward` with a deadline for its reward; any other agent unchanged."""
    reward = reward_function_of(agent)
    if reward is None or timeout_s is None:
        return agent
    return with_reward(agent.__wrapped__, reward, timeout_s=timeout_s)  # type: ignore[attr-defined]


def check_reward(reward: AnyReward) -> None:
    """Check that a reward function can be called with a task and an answer.

    Raises:
        ConfigError: if it cannot.
    """
    name = _name_of(reward)
    if not callable(reward):
        raise ConfigError(f"reward={shown(reward)}: use a function of a task and an answer")
    groups = scores_groups(reward)
    more: JSONObject = {"trajectories": []} if groups and "trajectories" in _parameters(reward) else {}
    try:
        inspect.signature(reward).bind({}, [] if groups else "", **more)
    except TypeError as error:
        wanted = "a task and the answers of a group" if groups else "a task and an answer"
        raise ConfigError(
            f"reward {name}: it must take {wanted}, as in `def reward(task, answer{'s' * groups})`; {error}"
        ) from error
    except ValueError:  # a builtin without a signature
        return


def without_address(task: JSONMapping) -> JSONMapping:
    """Return the fields of a task without the address that the engine adds for a function that asks for it."""
    return {name: value for name, value in task.items() if name not in _ADDRESS_PARAMETERS}


def _episode(verdict: RewardOutput, reward: AnyReward, answer: object) -> Episode:
    episode = Episode(trajectories=[Trajectory(output=answer)])
    give_reward(episode, episode.trajectories[0], verdict, reward)
    return episode


def _unscored_episode(answer: object) -> object:
    """Return an agent's own trajectories, or else an episode of its answer; a group's reward scores either."""
    items = answer if isinstance(answer, list | tuple) and answer else [answer]
    if all(isinstance(item, Episode | Trajectory) for item in items):
        return answer
    return Episode(trajectories=[Trajectory(output=answer)])


def numbers_in(metadata: JSONMapping) -> dict[str, float]:
    """Return the finite numbers of a reward's metadata, which become metrics."""
    numbers = {str(name): as_float(value) for name, value in metadata.items() if is_number(value)}
    return {name: value for name, value in numbers.items() if abs(value) <= MAX_REWARD}


def give_reward(episode: Episode, trajectory: Trajectory, verdict: RewardOutput, reward: AnyReward) -> None:
    """Record a verdict on a trajectory and its episode, replacing any reward that it had."""
    trajectory.reward, trajectory.reward_parts = verdict.reward, dict(verdict.parts)
    for step in trajectory.steps:  # otherwise their sum would replace a missing reward
        step.reward = None
    if verdict.metadata:
        trajectory.info[VERDICT_KEY] = dict(verdict.metadata)
    right = verdict.reward is not None and verdict.reward >= 1.0
    episode.is_correct = right if verdict.is_correct is None else verdict.is_correct
    episode.metrics.update(numbers_in(verdict.metadata))
    if verdict.reward is None:
        reason = f": {verdict.metadata['error']}" if "error" in verdict.metadata else " returned None"
        episode.info["unscored"] = f"reward {_name_of(reward)}{reason}"
