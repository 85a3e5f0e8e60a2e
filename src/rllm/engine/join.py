"""Join an agent's trajectories with the tokens of its calls: by trace id, never by position.

Answers of parallel calls arrive in any order, so a position does not identify whose tokens they are. `complete` is the
last step of every rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.capture import side_calls
from rllm.capture.side_calls import OWN_KEY
from rllm.engine.request import RolloutRequest
from rllm.errors import AgentError, CaptureError
from rllm.parser.chat_template import lost_warning
from rllm.sdk.context import SESSION_UID
from rllm.types import (
    LOST_KEY,
    NO_TOKENS_KEY,
    NUM_SIDE_CALLS_KEY,
    NUM_UNUSABLE_CALLS_KEY,
    REFERENCE_KEY,
    SOURCE_KEY,
    Episode,
    Message,
    Step,
    Trace,
    Trajectory,
    grouped,
    is_scored,
    text_of,
)

DEFAULT_NAME = "agent"


def complete(
    episode: Episode, attempt: RolloutRequest, traces: Sequence[Trace], *, seen: Sequence[Trace] = ()
) -> Episode:
    """Return the same episode, identified and joined with its attempt's traces: every step gets its tokens.

    A trainable step gets usable tokens, or an error if tokens are required. Side calls, which are not part of the task,
    belong to no trajectory, unless a step names them or the attempt includes them.

    Args:
        episode: changed in place.
        attempt: the attempt that it records.
        traces: in call order.
        seen: the traces that were recorded in this process, so that `@trajectory` knew them.

    Raises:
        AgentError: if calls cannot be assigned to a trajectory.
        CaptureError: if a trainable trajectory has no usable tokens, or names a call that was not captured.
    """
    _identify(episode, attempt)
    _drop_repeated(episode)
    aside = set() if attempt.side_calls else {*side_calls(traces)}
    _give_steps(episode.trajectories, traces, aside)
    by_id = {trace.id: trace for trace in traces}
    _recognize(episode, by_id)
    _add_unseen(episode.trajectories, traces, aside | {trace.id for trace in seen})
    for trajectory in episode.trajectories:
        if trajectory.trainable and attempt.tokens_required:
            _check_captured(trajectory, by_id)
            _keep_usable(trajectory, by_id)
        for step in trajectory.steps:
            if step.id in by_id:
                step.fill_from(by_id[step.id])
    _warn_of_equal_names(episode)
    # Content that the agent sent and the chat template dropped.
    if lost := sorted({kind for trace in traces for kind in trace.metadata.get(LOST_KEY) or ()}):
        episode.info[LOST_KEY] = lost
    for kind in lost:
        warn(episode, lost_warning(kind))
    if errors := [trace.error for trace in traces if trace.error is not None]:
        episode.info[NO_TOKENS_KEY] = errors[0]
    episode.metrics.setdefault("rollout/num_calls", float(len(traces)))
    return episode


def awaited_ids(episode: Episode, attempt: RolloutRequest, seen: Sequence[Trace]) -> set[str]:
    """Return the ids of the calls whose traces `complete` needs.

    An unknown id on a step that has messages or a response is not a call's id, so it is not awaited.
    """
    known = {trace.id for trace in seen}
    trainable = [trajectory for trajectory in episode.trajectories if trajectory.trainable and attempt.trainable]
    steps = [step for trajectory in trainable for step in trajectory.steps]
    return {
        step.id
        for step in steps
        if not _has_tokens(step) and (step.id in known or not (step.model_response or step.chat_completions))
    }


def _recognize(episode: Episode, by_id: Mapping[str, Trace]) -> None:
    """Set the id of each step that only has messages and a response to the id of the call with exactly these.

    Calls with equal messages and responses are interchangeable, and taken in call order. If different calls match, none
    is taken, since that would be a guess.
    """
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    named = {step.id for step in steps}
    # By response, so that no step is compared with every call.
    unclaimed = grouped((text_of(trace.response), trace) for trace in by_id.values() if trace.id not in named)
    for step in steps:
        if step.id in by_id or _has_tokens(step):
            continue
        asked, answer = step.chat_completions, {"content": step.model_response}
        if asked and asked[-1].get("role") == "assistant":
            *asked, answer = asked
        candidates = unclaimed.get(text_of(answer), [])
        fitting = [trace for trace in candidates if _is_exchange(trace, asked, answer)]
        if fitting and all(
            other.messages == fitting[0].messages and other.response == fitting[0].response for other in fitting[1:]
        ):
            candidates.remove(fitting[0])
            step.id = fitting[0].id


def _is_exchange(trace: Trace, asked: Sequence[Message], answer: Message) -> bool:
    """Return whether a call with the same response text matches a step."""
    calls = answer.get("tool_calls")
    if calls and calls != trace.response.get("tool_calls"):
        return False
    return bool(text_of(answer) or calls) and (not asked or asked == trace.messages)


def _give_steps(trajectories: Sequence[Trajectory], traces: Sequence[Trace], aside: set[str]) -> None:
    """Give trajectories without steps their calls.

    These are the calls made inside their function, or all calls if there is only one trajectory. Calls that are `aside`
    are left out, unless there are no others.
    """
    for trajectory in trajectories:
        if trajectory.steps:
            continue
        uid = trajectory.info.get(SESSION_UID)
        if uid is not None:
            calls = _made_in(uid, traces)
        elif len(trajectories) == 1:
            calls = list(traces)
        else:
            raise AgentError(
                f"{len(trajectories)} trajectories were returned, and {trajectory.name!r} has no steps, so it is not "
                "known which calls are its own: make it with @trajectory, or add Step(id=response.id) for each of "
                "them"
            )
        taken = [trace for trace in calls if trace.id not in aside] or calls
        if len(taken) < len(calls):
            trajectory.info[NUM_SIDE_CALLS_KEY] = len(calls) - len(taken)
        trajectory.steps = [Step.from_trace(trace) for trace in taken]


def _made_in(uid: str, traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if uid in trace.metadata.get(OWN_KEY, ())]


def _add_unseen(trajectories: Sequence[Trajectory], traces: Sequence[Trace], known: set[str]) -> None:
    """Add other calls to a `@trajectory` with steps: only chat calls of this process are seen while it runs.

    A seen call that is not a step any more was removed by the agent's author.
    """
    known = known.union(step.id for trajectory in trajectories for step in trajectory.steps)
    place = {trace.id: number for number, trace in enumerate(traces)}
    for trajectory in trajectories:
        trajectory.steps = list(trajectory.steps)
        for trace in _made_in(trajectory.info.get(SESSION_UID, ""), traces):
            if trace.id in known or trace.error is not None:
                continue
            later = (n for n, step in enumerate(trajectory.steps) if place.get(step.id, -1) > place[trace.id])
            trajectory.steps.insert(next(later, len(trajectory.steps)), Step.from_trace(trace))


def _check_captured(trajectory: Trajectory, by_id: Mapping[str, Trace]) -> None:
    for step in trajectory.steps:
        if step.id not in by_id:
            tokens = "has tokens, but " if _has_tokens(step) else ""
            raise CaptureError(
                f"trajectory {trajectory.name!r}: its step {step.id!r} {tokens}is not a call that the gateway captured "
                "in this session (was it made with use_proxy=False, in another rollout, or a Step built without "
                "id=response.id?); set trajectory.trainable = False if it should not be trained on"
            )


def _has_tokens(step: Step) -> bool:
    return bool(step.prompt_ids) and 0 < len(step.response_ids) == len(step.logprobs)


def _keep_usable(trajectory: Trajectory, by_id: Mapping[str, Trace]) -> None:
    """Drop steps whose calls have no usable tokens, such as failed ones; the final reward stays."""
    errors = {step.id: by_id[step.id].error for step in trajectory.steps if step.id in by_id and by_id[step.id].error}
    if errors and len(errors) == len({step.id for step in trajectory.steps}):
        raise CaptureError(
            f"trajectory {trajectory.name!r}: none of its {len(errors)} calls has usable tokens: "
            f"{next(iter(errors.values()))}"
        )
    if errors:
        if is_scored(reward := trajectory.final_reward()):
            trajectory.reward = reward
        trajectory.info[NUM_UNUSABLE_CALLS_KEY] = len(errors)
        trajectory.steps = [step for step in trajectory.steps if step.id not in errors]


def warn(episode: Episode, warning: str) -> None:
    """Add a warning to the episode."""
    warnings = episode.info.setdefault("warnings", [])
    if warning not in warnings:
        warnings.append(warning)


def _identify(episode: Episode, attempt: RolloutRequest) -> None:
    episode.task, episode.task_id, episode.index = attempt.task, attempt.task_id, attempt.index
    episode.id = f"{attempt.task_id}:{attempt.index}"
    episode.session_id = attempt.session_id
    if attempt.source is not None:
        episode.info[SOURCE_KEY] = attempt.source
    for trajectory in episode.trajectories:
        trajectory.task = attempt.task if trajectory.task is None else trajectory.task
        if trajectory.trainable and not attempt.trainable:
            trajectory.trainable = False
            if attempt.split == "train":
                trajectory.info[REFERENCE_KEY] = True
    unscored = [trajectory.name for trajectory in episode.trajectories if trajectory.final_reward() is None]
    if unscored:
        remedy = "return a number, give the trajectory a reward, or name the function that judges it (--reward)"
        episode.info.setdefault("unscored", f"no reward was returned for {', '.join(map(repr, unscored))}: {remedy}")


def _drop_repeated(episode: Episode) -> None:
    """Remove duplicates: the same trajectory of an episode, the same step of a trajectory."""
    paths: dict[Any, Trajectory] = {}
    for path in episode.trajectories:
        steps: dict[str, Step] = {}
        for step in path.steps:
            steps.setdefault(step.id, step)
        if len(steps) < len(path.steps):
            warn(episode, f"trajectory {path.name!r} has the same step more than once; it counts once")
            path.steps = list(steps.values())
        paths.setdefault((path.uid, path.name, *steps), path)
    if len(paths) < len(episode.trajectories):
        warn(episode, "the same trajectory was given more than once; it counts once: create a Trajectory for each")
        episode.trajectories = list(paths.values())


def _warn_of_equal_names(episode: Episode) -> None:
    count = Counter(trajectory.name for trajectory in episode.trajectories)[DEFAULT_NAME]
    if count > 1:
        warn(
            episode,
            f"{count} trajectories are all named {DEFAULT_NAME!r}, so they are compared with each other as one role: "
            "give each role its own name, such as @trajectory(name='solver')",
        )
