"""Join an agent's trajectories with the tokens of the calls it made: by trace id, never by position.

Answers of parallel calls arrive in any order, so a position says nothing about whose tokens these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rllm.capture import side_calls
from rllm.capture.side_calls import OWN_KEY
from rllm.engine.runner import Attempt
from rllm.errors import AgentError, CaptureError
from rllm.sdk.decorators import SESSION_UID
from rllm.types import (
    NUM_SIDE_CALLS_KEY,
    NUM_UNUSABLE_CALLS_KEY,
    Episode,
    Message,
    Step,
    Trace,
    Trajectory,
    is_scored,
    text_of,
)


def join(
    episode: Episode,
    traces: Sequence[Trace],
    *,
    seen: Sequence[Trace] = (),
    tokens_required: bool = True,
    take_side_calls: bool = False,
) -> None:
    """Give every trajectory its steps, and every step its tokens. `traces` are in call order; of these `@trajectory` has known
    those that were `seen` to be made.

    What is trainable gets usable tokens or an error, if tokens are required; of the rest, what there is. Calls that an
    agent's program makes beside its task belong to no trajectory, unless a step names them or `take_side_calls` says so.

    Raises:
        AgentError: if it cannot be told whose calls these are.
        CaptureError: if a trainable trajectory has no usable tokens, or names a call that was not captured.
    """
    aside = set() if take_side_calls else {*side_calls(traces)}
    _give_steps(episode.trajectories, traces, aside)
    by_id = {trace.id: trace for trace in traces}
    _recognise(episode, by_id)
    _add_unseen(episode.trajectories, traces, aside | {trace.id for trace in seen})
    for trajectory in episode.trajectories:
        if trajectory.trainable and tokens_required:
            _check_captured(trajectory, by_id)
            _keep_usable(trajectory, by_id)
        for step in trajectory.steps:
            if step.id in by_id:
                step.fill_from(by_id[step.id])


def awaited_ids(episode: Episode, attempt: Attempt, seen: Sequence[Trace]) -> set[str]:
    """The ids of the calls whose traces `join` cannot do without.

    An id that is not among the calls `seen` to be made, of a step that tells what was said, is merely made up.
    """
    known = {trace.id for trace in seen}
    trainable = [trajectory for trajectory in episode.trajectories if trajectory.trainable and attempt.trainable]
    steps = [step for trajectory in trainable for step in trajectory.steps]
    return {step.id for step in steps if not _has_tokens(step) and (step.id in known or not _is_told(step))}


def _is_told(step: Step) -> bool:
    return bool(step.model_response or step.chat_completions)


def _recognise(episode: Episode, by_id: Mapping[str, Trace]) -> None:
    """Name the calls of steps that only tell what was said: a step has the id of the call with its messages and answer.

    Calls that said the same to the same are interchangeable, and are taken in call order. Where calls that differ fit
    alike, none is taken: it would be a guess.
    """
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    named = {step.id for step in steps}
    unclaimed: dict[str, list[Trace]] = {}  # by what they answered, so that no step is compared with every call
    for trace in by_id.values():
        if trace.id not in named:
            unclaimed.setdefault(text_of(trace.response), []).append(trace)
    for step in steps:
        if step.id in by_id or _has_tokens(step):
            continue
        asked, answer = _exchange_in(step)
        candidates = unclaimed.get(text_of(answer), [])
        fitting = [trace for trace in candidates if _is_exchange(trace, asked, answer)]
        if fitting and all(_say_the_same(fitting[0], other) for other in fitting[1:]):
            candidates.remove(fitting[0])
            step.id = fitting[0].id


def _exchange_in(step: Step) -> tuple[list[Message], Message]:
    """The messages that a step tells of, none if it tells only of the answer; and the answer."""
    if step.chat_completions and step.chat_completions[-1].get("role") == "assistant":
        *asked, answer = step.chat_completions
        return asked, answer
    return step.chat_completions, {"content": step.model_response}


def _is_exchange(trace: Trace, asked: Sequence[Message], answer: Message) -> bool:
    """Whether a call that answered with the same text is the one that is told of."""
    calls = answer.get("tool_calls")
    if calls and calls != trace.response.get("tool_calls"):
        return False
    return bool(text_of(answer) or calls) and (not asked or asked == trace.messages)


def _say_the_same(one: Trace, other: Trace) -> bool:
    return one.messages == other.messages and one.response == other.response


def _give_steps(trajectories: Sequence[Trajectory], traces: Sequence[Trace], aside: set[str]) -> None:
    """Trajectories without steps take the calls made inside their function, or all calls if there is only one; of these,
    those that are not `aside`."""
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
                f"{len(trajectories)} trajectories were returned, and {trajectory.name!r} has no steps, so its calls cannot "
                "be told from the others': make it with @trajectory, or add Step(id=response.id) for each of its calls"
            )
        taken = [trace for trace in calls if trace.id not in aside] or calls
        if len(taken) < len(calls):
            trajectory.info[NUM_SIDE_CALLS_KEY] = len(calls) - len(taken)
        trajectory.steps = [Step.from_trace(trace) for trace in taken]


def _made_in(uid: str, traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if uid in trace.metadata.get(OWN_KEY, ())]


def _add_unseen(trajectories: Sequence[Trajectory], traces: Sequence[Trace], known: set[str]) -> None:
    """Give a `@trajectory` that has steps those of its other calls, too: only chats are seen as they are made in this process, and
    what was seen and is no step any more was taken out by its author."""
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
                f"trajectory {trajectory.name!r}: its step {step.id!r} {tokens}is not a call that the gateway captured in this "
                "session (was it made with use_proxy=False, in another rollout, or a Step built without id=response.id?); "
                "set trajectory.trainable = False if it is not to be learned from"
            )


def _has_tokens(step: Step) -> bool:
    return bool(step.prompt_ids) and 0 < len(step.response_ids) == len(step.logprobs)


def _keep_usable(trajectory: Trajectory, by_id: Mapping[str, Trace]) -> None:
    """Drop the steps whose calls have no usable tokens, such as those that failed; what they had earned stays."""
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
