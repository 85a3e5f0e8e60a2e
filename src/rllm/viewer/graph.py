"""Pictures of rollouts: the graph of an episode, and the timeline of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from rllm.capture import SessionTree
from rllm.capture.side_calls import LaterMessages, side_calls
from rllm.errors import counted
from rllm.parser.append_only import common_length
from rllm.types import StepCredit, Trace, why_left_out
from rllm.viewer.rollouts import StoredRollout
from rllm.viewer.texts import message_parts
from rllm.viewer.tokens import credit_of_calls

COLUMN, ROW, LABEL, MARGIN = 96, 58, 120, 34
"""Distances in units of the picture."""
NO_TRAJECTORY = "no trajectory"
"""Role of calls that belong to no trajectory, such as side calls."""
_MAX_ORIGINS = 100
"""Earlier calls that are searched for what a new conversation quotes."""


@dataclass(kw_only=True)
class Call:
    """One model call."""

    number: int
    """Number in call order, from 1."""
    trace: Trace
    role: str
    credit: StepCredit | None
    reward: float | None
    """Reward of the step."""
    side_call: str | None = None
    """Reason that it is in no trajectory, if it is a side call; see `rllm.capture.side_calls`."""
    parent: Call | None = None
    """Call whose tokens, or else whose messages, its prompt begins with."""
    is_exact: bool = True
    """True if it continues the parent's exact tokens."""
    children: list[Call] = field(default_factory=list)
    origin: Call | None = None
    """Call that it quotes, if it has no parent: a summary, or a tool call that started a sub-agent."""
    begins: str = ""
    """Text before the number of its parent or origin, if it begins a segment there."""
    branch: int = 0
    """Line within its lane."""
    x: float = 0.0
    y: float = 0.0

    @property
    def tools(self) -> list[str]:
        return [name for name, _ in message_parts(self.trace.response).tools]

    @property
    def advantage(self) -> float | None:
        return self.credit.advantage if self.credit else None

    @property
    def dropped(self) -> str | None:
        """Reason that it was not trained on."""
        if self.side_call:
            return f"side call ({self.side_call}), whose answer is in no later message"
        return why_left_out(self.credit.dropped) if self.credit and self.credit.dropped else None

    @property
    def new_messages(self) -> list[dict[str, object]]:
        """Messages of the prompt after its parent's messages."""
        if self.parent is None:
            return list(self.trace.messages)
        prior, messages = [*self.parent.trace.messages, self.parent.trace.response], self.trace.messages
        alike = common_length(prior, messages)  # most are equal
        alike += common_length(list(map(_content_key, prior[alike:])), list(map(_content_key, messages[alike:])))
        return list(messages[alike:])

    @cached_property
    def content_keys(self) -> list[int]:
        """Keys by which its messages are compared."""
        return [hash(_content_key(item)) for item in self.trace.messages]


@dataclass(kw_only=True)
class Reward:
    """Reward of an agent, drawn at the end of its lane."""

    role: str
    value: float | None
    credited: list[Call]
    x: float = 0.0
    y: float = 0.0


@dataclass(kw_only=True)
class Segment:
    """Calls whose tokens continue each other; the trainer makes one sequence of them."""

    calls: list[Call]
    depth: int = 0
    """Number of segments that it descends from."""

    @property
    def num_sampled(self) -> int:
        return sum(len(call.trace.response_ids) for call in self.calls)

    @property
    def source(self) -> Call | None:
        """Call that it begins from, in the segment that it descends from."""
        return self.calls[0].parent or self.calls[0].origin


@dataclass(kw_only=True)
class Graph:
    """The whole picture."""

    calls: list[Call]
    segments: list[Segment]
    """All segments of the agents, each before those that descend from it."""
    lanes: list[tuple[str, float, float]]
    """Role, top and height."""
    rewards: list[Reward]
    width: float
    height: float

    @property
    def num_forks(self) -> int:
        return sum(max(len(call.children) - 1, 0) for call in self.calls)


def graph_of(rollout: StoredRollout, traces: Sequence[Trace], credits_: Sequence[StepCredit]) -> Graph:
    """Lay out an episode in call order from left to right."""
    calls = _calls(rollout, traces, credits_)
    _link(calls)
    segments = _segments([call for call in calls if call.role != NO_TRAJECTORY])
    roles = list(dict.fromkeys([path.name for path in rollout.paths] + [call.role for call in calls]))
    lanes: list[tuple[str, float, float]] = []
    top = 0.0
    for role in roles:
        members = [call for call in calls if call.role == role]
        height: float = ROW * (1 + max((call.branch for call in members), default=0))
        for call in members:
            call.x = LABEL + MARGIN + COLUMN * (call.number - 1)
            call.y = top + ROW / 2 + ROW * call.branch
        lanes.append((role, top, height))
        top += height
    end = LABEL + MARGIN + COLUMN * max(len(calls), 1)
    return Graph(
        calls=calls,
        segments=segments,
        lanes=lanes,
        rewards=_rewards(rollout, calls, lanes, end),
        width=end + 90,
        height=max(top, ROW),
    )


def _calls(rollout: StoredRollout, traces: Sequence[Trace], credits_: Sequence[StepCredit]) -> list[Call]:
    credit_of = credit_of_calls(credits_)
    own = {step.id: (path.name, step.reward) for path in rollout.paths for step in path.steps}
    aside = side_calls(traces)
    calls = []
    for number, trace in enumerate(traces, start=1):
        credit = credit_of.get(trace.id)
        role, reward = own.get(trace.id, ("", None))
        role = role or (credit.trajectory_name if credit else "") or (NO_TRAJECTORY if rollout.paths else "agent")
        side_call = aside.get(trace.id) if role == NO_TRAJECTORY else None
        calls.append(Call(number=number, trace=trace, role=role, credit=credit, reward=reward, side_call=side_call))
    return calls


def _link(calls: Sequence[Call]) -> None:
    """Set parent and line of each call: a second child of one parent is a fork, on a new line."""
    tree = SessionTree([call.trace for call in calls])
    messages: LaterMessages | None = None
    for place, call in enumerate(calls):
        earlier = [item for item in calls[:place] if item.role == call.role]
        by_id = {item.trace.id: item for item in earlier}
        ancestors = tree.path_to(call.trace)[-2::-1]
        call.parent = next((by_id[trace.id] for trace in ancestors if trace.id in by_id), None)
        if call.parent is None and earlier:
            best = max(earlier, key=lambda item: common_length(item.content_keys, call.content_keys))
            num_messages = len(best.trace.messages)
            if 0 < num_messages == common_length(best.content_keys, call.content_keys) < len(call.trace.messages):
                call.parent, call.is_exact = best, False
        next_line = max((item.branch for item in earlier), default=-1) + 1
        if call.parent is not None:
            is_fork = bool(call.parent.children)
            call.branch = next_line if is_fork else call.parent.branch
            call.begins = "continues the messages, not the tokens, of" if not call.is_exact else "forks from" * is_fork
            call.parent.children.append(call)
            continue
        if place:
            messages = messages or LaterMessages([item.trace for item in calls])
            call.origin, call.begins = _origin(place, calls, messages.only(place))
        if call.origin or any(
            item.trace.started_at + item.trace.timings.get("total_s", 0.0) > call.trace.started_at for item in earlier
        ):
            call.branch = next_line  # another call of the lane was under way


def _origin(place: int, calls: Sequence[Call], messages: LaterMessages) -> tuple[Call | None, str]:
    """Return the latest earlier call whose answer or tool call a call's messages quote, and which of the two."""
    for number in reversed(range(max(place - _MAX_ORIGINS, 0), place)):
        if calls[number].role != NO_TRAJECTORY:
            if messages.quote_answer_of(number):
                return calls[number], "quotes the answer of"
            if messages.quote_tool_call_of(number):
                return calls[number], "quotes a tool call of"
    return None, ""


def _segments(calls: Sequence[Call]) -> list[Segment]:
    """Return the segments as a tree, in which each stands before those that begin from one of its calls."""
    of_call: dict[int, Segment] = {}
    descendants: dict[int, list[Segment]] = {}
    for call in calls:
        parent = call.parent
        if parent is not None and not call.begins:
            segment = of_call[parent.number]
        else:
            segment = Segment(calls=[])
            source = parent or call.origin
            descendants.setdefault(source.number if source else 0, []).append(segment)
        segment.calls.append(call)
        of_call[call.number] = segment
    ordered: list[Segment] = []
    waiting = descendants.get(0, [])[::-1]
    while waiting:
        segment = waiting.pop()
        ordered.append(segment)
        below = [child for call in segment.calls for child in descendants.get(call.number, ())]
        for child in below:
            child.depth = segment.depth + 1
        waiting += below[::-1]
    return ordered


def _content_key(message: Mapping[str, object]) -> object:
    parts = message_parts(message)
    return parts.role, parts.text.strip(), tuple(name for name, _ in parts.tools)


def _rewards(
    rollout: StoredRollout, calls: Sequence[Call], lanes: Sequence[tuple[str, float, float]], end: float
) -> list[Reward]:
    rewards = []
    for role, top, height in lanes:
        paths = [path for path in rollout.paths if path.name == role]
        if not paths:
            continue
        credited = [call for call in calls if call.role == role]
        credited = [call for call in credited if call.advantage is not None or call.reward is not None]
        for number, path in enumerate(paths):
            own = {step.id for step in path.steps}
            members = [call for call in credited if call.trace.id in own]
            y = top + ROW / 2 + number * min(ROW / 2, height / len(paths))
            rewards.append(Reward(role=role, value=path.reward, credited=members, x=end + 24, y=y))
    return rewards


Kind: TypeAlias = Literal["wait", "queue", "model", "tool", "reward"]

KINDS: dict[Kind, str] = {
    "wait": "waiting for a slot, as the maximum number of rollouts is running",
    "queue": "in the queue of the inference server",
    "model": "the model generates the answer",
    "tool": "between calls: tools, environment, the agent's own code",
    "reward": "after the last call: the reward, and the agent's own code",
}
_STUCK_S = 60.0
"""Seconds without a call after which an unfinished rollout counts as stuck."""
_SLOW = 5


@dataclass(frozen=True, kw_only=True)
class Period:
    """A period of one kind, in seconds from the start of the step."""

    kind: Kind
    start: float
    stop: float
    label: str = ""


@dataclass(kw_only=True)
class Lane:
    """One rollout."""

    rollout: StoredRollout
    periods: list[Period] = field(default_factory=list)
    is_slow: bool = False
    """True for the slowest rollouts."""
    is_stuck: bool = False

    @property
    def stop(self) -> float:
        return max((period.stop for period in self.periods), default=0.0)

    @property
    def seconds(self) -> float:
        """Duration without the wait for a slot."""
        return self.stop - min((item.start for item in self.periods if item.kind != "wait"), default=self.stop)

    def total(self, kind: Kind) -> float:
        """Return the seconds of one kind; parallel calls add up."""
        return sum(item.stop - item.start for item in self.periods if item.kind == kind)


def timeline(
    rollouts: Sequence[StoredRollout], traces_of: dict[str, list[Trace]], *, now: float | None = None
) -> list[Lane]:
    """Return a lane for each rollout, in order of their start."""
    if not rollouts:
        return []
    now = time.time() if now is None else now
    began = min(item.created_at for item in rollouts)
    lanes = [
        _lane(item, traces_of.get(item.session_id, []), began, now)
        for item in sorted(rollouts, key=lambda item: item.created_at)
    ]
    ended = sorted((lane for lane in lanes if lane.rollout.has_ended), key=lambda lane: -lane.seconds)
    for lane in ended[:_SLOW] if len(ended) > _SLOW else []:
        lane.is_slow = True
    return lanes


def _lane(rollout: StoredRollout, traces: Sequence[Trace], began: float, now: float) -> Lane:
    lane = Lane(rollout=rollout)
    start = rollout.created_at - began
    if start > 0.001:
        lane.periods.append(Period(kind="wait", start=0.0, stop=start))
    at = start
    for trace in sorted(traces, key=lambda item: item.started_at):
        asked = max(trace.started_at - began, start)
        if asked > at:
            lane.periods.append(Period(kind="tool", start=at, stop=asked))
        answered = asked + trace.timings.get("total_s", 0.0)
        queued = min(trace.timings.get("queue_s", 0.0), answered - asked)
        if queued > 0:
            lane.periods.append(Period(kind="queue", start=asked, stop=asked + queued))
        lane.periods.append(
            Period(kind="model", start=asked + queued, stop=answered, label=counted(len(trace.response_ids), "token"))
        )
        at = max(at, answered)
    end = start + rollout.seconds if rollout.seconds is not None else None
    if end is not None and end > at:
        lane.periods.append(Period(kind="reward", start=at, stop=end))
    timed_out = rollout.ended == "timeout"
    lane.is_stuck = timed_out or (not rollout.has_ended and now - began - at > _STUCK_S)
    return lane
