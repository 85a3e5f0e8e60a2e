"""Validation of what users' code returns: episodes and trajectories, and the types an agent function may return.

Everything after a rollout relies on the fields having the types that `rllm.types` declares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from rllm.errors import AgentError, ConfigError, RewardError, shown
from rllm.rewards.scoring import MAX_REWARD, as_float, is_number, reward_output
from rllm.types import Episode, JSONObject, Message, Step, TerminationReason, Trajectory, is_scored

T = TypeVar("T")


def check_episode(episode: Episode, agent: str) -> None:
    """Convert each field to the type that it has in `rllm.types`.

    Numbers become floats, and arrays of token ids lists. A `termination_reason`, `info["error"]` and `info["warnings"]`
    may be text, and a message an object with `model_dump`.

    Raises:
        AgentError: if a field is wrong; the message has the field, its value, and the expected type.
    """
    check_trajectories(episode.trajectories, agent)
    episode.info = _mapping(episode.info, "info of its episode", agent)
    if error := episode.info.get("error"):
        fields = error if isinstance(error, Mapping) else {"message": error}
        episode.info["error"] = {
            "type": str(fields.get("type", "AgentError")),
            "message": str(fields.get("message", error)),
            "traceback": str(fields.get("traceback", "")),
        }
    else:
        episode.info.pop("error", None)
    if not isinstance(episode.info.get("warnings", []), list):
        episode.info["warnings"] = [str(episode.info["warnings"])]
    episode.metrics = checked_metrics(_mapping(episode.metrics, "metrics of its episode", agent), agent)
    episode.is_correct = _bool(episode.is_correct, "is_correct of its episode", agent)
    episode.termination_reason = _reason(episode.termination_reason, agent)


def check_trajectories(trajectories: object, agent: str) -> None:
    """Convert the fields of trajectories and their steps; see `check_episode`."""
    for trajectory in _items(trajectories, Trajectory, "trajectories of its episode", agent):
        _check_form(trajectory, agent)
        parts = _mapping(trajectory.reward_parts, f"reward_parts of trajectory {trajectory.name!r}", agent)
        trajectory.reward_parts = checked_metrics(parts, agent)
        scored: list[Trajectory | Step] = [trajectory, *trajectory.steps]
        for item in scored:
            if is_scored(item.reward):
                item.reward = checked_reward_of(item.reward, f"reward on trajectory {trajectory.name!r}", agent)


def has_form(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be kept in the record of a failed rollout, whose rewards do not count."""
    try:
        _check_form(trajectory, "")
    except AgentError:
        return False
    return True


def _check_form(trajectory: Trajectory, agent: str) -> None:
    """Check all fields but the rewards."""
    trajectory.name = ("" if trajectory.name is None else str(trajectory.name)) or "agent"
    name = f"trajectory {trajectory.name!r}"
    trajectory.trainable = _bool(trajectory.trainable, f"trainable of {name}", agent)
    trajectory.uid = _id(trajectory.uid, f"uid of {name}", agent)
    trajectory.info = _mapping(trajectory.info, f"info of {name}", agent)
    for step in _items(trajectory.steps, Step, f"steps of {name}", agent):
        step.id = _id(step.id, f"id of a step of {name}", agent)
        step.info = _mapping(step.info, f"info of a step of {name}", agent)
        step.chat_completions = _messages(step.chat_completions, f"chat_completions of a step of {name}", agent)
        step.model_response = _text(step.model_response, f"model_response of a step of {name}", agent)
        for field in ("prompt_ids", "response_ids", "logprobs"):
            setattr(step, field, _numbers(getattr(step, field), f"{field} of a step of {name}", agent))


def checked_metrics(metrics: Mapping[Any, Any], agent: str) -> dict[str, float]:
    """Return metrics as floats, keyed by text; raise `AgentError` for a value that is not a finite number."""
    remedy = "a finite number; other values belong in the episode's info"
    return {str(name): _number(value, f"metric {name!r}", remedy, agent) for name, value in metrics.items()}


def checked_reward_of(value: object, what: str, agent: str) -> float:
    """Return a reward as a float; raise `AgentError` if it is not a finite number."""
    return _number(value, what, "a finite number, or None for 'not scored'", agent)


def _id(value: object, what: str, agent: str) -> str:
    if not isinstance(value, str):
        raise _wrong(what, value, "a text, such as the id of the model's response", agent)
    return value


def _text(value: object, what: str, agent: str) -> str:
    if value is not None and not isinstance(value, str):
        raise _wrong(what, value, "a text", agent)
    return value or ""


def _bool(value: object, what: str, agent: str) -> bool:
    return value is not None and bool(_number(value, what, "True or False", agent))


def _numbers(values: object, what: str, agent: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if values is not None and not isinstance(values, list | tuple):
        raise _wrong(what, values, "a list of numbers", agent)
    return values if isinstance(values, list) else list(values or ())


def _reason(reason: object, agent: str) -> TerminationReason | None:
    try:
        return None if reason is None else TerminationReason(reason)
    except ValueError:
        known = ", ".join(item.name for item in TerminationReason)
        raise _wrong("termination_reason of its episode", reason, f"a TerminationReason: {known}", agent) from None


def _messages(messages: object, what: str, agent: str) -> list[Message]:
    if messages is None:
        return []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        messages = [_message(message, what, agent) for message in _items(messages, object, what, agent)]
    for message in messages:
        if not isinstance(message.get("content"), str | list | tuple | None):
            raise _wrong(f"content of a message in {what}", message["content"], "a text or a list of parts", agent)
    return cast("list[Message]", messages)


def _message(message: object, what: str, agent: str) -> Message:
    if callable(dump := getattr(message, "model_dump", None)):
        return dict(dump(exclude_none=True))
    return _mapping(message, f"message in {what}", agent, remedy="a dict with a role and its content")


def _items(values: object, kind: type[T], what: str, agent: str) -> list[T] | tuple[T, ...]:
    if not isinstance(values, list | tuple):
        raise _wrong(what, values, f"a list of {kind.__name__}", agent)
    for value in values:
        if not isinstance(value, kind):
            raise AgentError(
                f"{agent} returned {shown(value)} of type {type(value).__name__} among the {what}: use "
                f"{kind.__name__}(...) for each"
            )
    return values


def _mapping(value: object, what: str, agent: str, remedy: str = "a dict") -> JSONObject:
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(what, value, remedy, agent)
    return value if isinstance(value, dict) else dict(value or {})


def _number(value: Any, what: str, remedy: str, agent: str) -> float:
    number = as_float(value) if is_number(value) else math.nan
    if not abs(number) <= MAX_REWARD:
        too_large = f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        raise _wrong(what, value, too_large if math.isfinite(number) else remedy, agent)
    return number


def _wrong(what: str, value: object, remedy: str, agent: str) -> AgentError:
    return AgentError(f"{agent} returned the {what} {shown(value)}: use {remedy}")


ACCEPTED = (
    "a number, {name: number} for several parts, (reward, {metric: number}), a Trajectory, a list of Trajectory, "
    "an Episode, or None for 'not scored'"
)

HOW_TO_SCORE = (
    "name the function that judges it (--reward FILE.py:function, or rllm.rewards.scoring.with_reward in Python), or "
    "return the reward itself"
)


def check_promise(function: object, agent: str) -> None:
    """Raise `ConfigError` for a function annotated to return text; a decorated one may return something else."""
    promised = getattr(function, "__annotations__", {}).get("return")
    if promised in (str, "str") and not hasattr(function, "__wrapped__"):
        raise ConfigError(f"{agent} returns text (-> str), which has no score: {HOW_TO_SCORE}")


def episode_from(returned: object, agent: str) -> Episode:
    """Return the episode for a return value, perhaps without its steps; raise `AgentError` for a wrong type."""
    if isinstance(returned, Episode):
        returned.trajectories = returned.trajectories or [Trajectory()]
        check_episode(returned, agent)
        return returned
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        episode = episode_from(returned[0], agent)
        episode.metrics.update(checked_metrics(returned[1], agent))
        return episode
    trajectories = _trajectories_from(returned, agent)
    check_trajectories(trajectories, agent)
    scored = [path for path in trajectories if path.final_reward() is not None]
    decides = [next(iter(path.reward_parts.values()), path.final_reward()) for path in scored[-1:]]
    return Episode(trajectories=trajectories, is_correct=any(score is not None and score >= 1.0 for score in decides))


def _trajectories_from(returned: Any, agent: str) -> list[Trajectory]:
    if not is_scored(returned):
        return [Trajectory()]
    if isinstance(returned, Trajectory):
        return [returned]
    if isinstance(returned, list | tuple) and returned and all(isinstance(item, Trajectory) for item in returned):
        return list(returned)
    if isinstance(returned, str):
        raise AgentError(f"{agent} returned {shown(returned)}, which has no score: {HOW_TO_SCORE}")
    if isinstance(returned, Mapping) and returned:
        try:
            verdict = reward_output(returned, agent)
        except RewardError as error:
            raise AgentError(str(error)) from error
        return [Trajectory(reward=verdict.reward, reward_parts=verdict.parts)]
    if not is_number(returned):
        raise AgentError(f"{agent} returned {shown(returned)} of type {type(returned).__name__}: return {ACCEPTED}")
    return [Trajectory(reward=checked_reward_of(returned, "reward", agent))]
