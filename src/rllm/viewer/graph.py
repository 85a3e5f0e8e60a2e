"""Graph of an episode: a lane for each agent, with calls, forks, tools, and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rllm.capture import SessionTree
from rllm.capture.side_calls import side_calls
from rllm.types import StepCredit, Trace
from rllm.viewer.messages import message_parts
from rllm.viewer.rollouts import Rollout
from rllm.viewer.tokens import credit_of_calls, num_alike

COLUMN, ROW, LABEL, MARGIN = 96, 58, 120, 34
"""Distances in units of the picture."""
NODE = 17
BESIDE = "beside the task"


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
        return self.credit.dropped.replace("_", " ") if self.credit and self.credit.dropped else None

    @property
    def new_messages(self) -> list[dict[str, object]]:
        """Messages of the prompt after those of its parent."""
        if self.parent is None:
            return list(self.trace.messages)
        prior, messages = [*self.parent.trace.messages, self.parent.trace.response], self.trace.messages
        alike = num_alike(prior, messages)  # most are equal
        alike += num_alike(list(map(_content_key, prior[alike:])), list(map(_content_key, messages[alike:])))
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
class Graph:
    """The whole picture."""

    calls: list[Call]
    lanes: list[tuple[str, float, float]]
    """Role, top and height."""
    rewards: list[Reward]
    width: float
    height: float

    @property
    def num_forks(self) -> int:
        return sum(max(len(call.children) - 1, 0) for call in self.calls)


def graph_of(rollout: Rollout, traces: Sequence[Trace], credits_: Sequence[StepCredit]) -> Graph:
    """Lay out an episode in call order from left to right."""
    calls = _calls(rollout, traces, credits_)
    _link(calls)
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
        calls=calls, lanes=lanes, rewards=_rewards(rollout, calls, lanes, end), width=end + 90, height=max(top, ROW)
    )


def _calls(rollout: Rollout, traces: Sequence[Trace], credits_: Sequence[StepCredit]) -> list[Call]:
    credit_of = credit_of_calls(credits_)
    own = {step.id: (path.name, step.reward) for path in rollout.paths for step in path.steps}
    aside = side_calls(traces)
    calls = []
    for number, trace in enumerate(traces, start=1):
        credit = credit_of.get(trace.id)
        role, reward = own.get(trace.id, ("", None))
        role = role or (credit.trajectory_name if credit else "") or (BESIDE if rollout.paths else "agent")
        side_call = aside.get(trace.id) if role == BESIDE else None
        calls.append(Call(number=number, trace=trace, role=role, credit=credit, reward=reward, side_call=side_call))
    return calls


def _link(calls: Sequence[Call]) -> None:
    """Set parent and line of each call: a second child of one parent is a fork, on a new line."""
    lines: dict[str, int] = {}
    tree = SessionTree([call.trace for call in calls])
    for place, call in enumerate(calls):
        earlier = [item for item in calls[:place] if item.role == call.role]
        by_id = {item.trace.id: item for item in earlier}
        ancestors = tree.path_to(call.trace)[-2::-1]
        call.parent = next((by_id[trace.id] for trace in ancestors if trace.id in by_id), None)
        if call.parent is None and earlier:
            best = max(earlier, key=lambda item: num_alike(item.content_keys, call.content_keys))
            num_messages = len(best.trace.messages)
            if 0 < num_messages == num_alike(best.content_keys, call.content_keys) < len(call.trace.messages):
                call.parent, call.is_exact = best, False
        if call.parent is None:
            call.branch = lines.get(call.role, 0) if earlier else 0
            if earlier:
                call.branch = max(item.branch for item in earlier) + 1 if _overlaps(earlier, call) else 0
        else:
            is_fork = bool(call.parent.children)
            call.branch = max(item.branch for item in earlier) + 1 if is_fork else call.parent.branch
            call.parent.children.append(call)


def _overlaps(earlier: Sequence[Call], call: Call) -> bool:
    """Return whether a call started while another call of the lane was under way."""
    return any(
        item.trace.started_at + item.trace.timings.get("total_s", 0.0) > call.trace.started_at for item in earlier
    )


def _content_key(message: Mapping[str, object]) -> object:
    parts = message_parts(message)
    return parts.role, parts.text.strip(), tuple(name for name, _ in parts.tools)


def _rewards(
    rollout: Rollout, calls: Sequence[Call], lanes: Sequence[tuple[str, float, float]], end: float
) -> list[Reward]:
    rewards = []
    for role, top, height in lanes:
        paths = [path for path in rollout.paths if path.name == role]
        if not paths:
            continue
        credited = [
            call for call in calls if call.role == role and (call.advantage is not None or call.reward is not None)
        ]
        for number, path in enumerate(paths):
            own = {step.id for step in path.steps}
            rewards.append(
                Reward(
                    role=role,
                    value=path.reward,
                    credited=[call for call in credited if call.trace.id in own],
                    x=end + 24,
                    y=top + ROW / 2 + number * min(ROW / 2, height / len(paths)),
                )
            )
    return rewards
