"""Timeline of rollouts: model, queue, tools and code of the agent, reward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rllm.errors import counted
from rllm.types import Trace
from rllm.viewer.rollouts import Rollout

Kind: TypeAlias = Literal["wait", "queue", "model", "tool", "reward"]

KINDS: dict[Kind, str] = {
    "wait": "waiting for its turn, as no more rollouts may be under way",
    "queue": "in the queue of the inference server",
    "model": "the model answers",
    "tool": "between calls: tools, environment, the agent's own code",
    "reward": "after the last call: the reward, and the agent's own code",
}
_STUCK_S = 60.0
"""Seconds without a call after which an unfinished rollout counts as stuck."""
_SLOW = 5


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A period of one kind, in seconds from the start of the step."""

    kind: Kind
    start: float
    stop: float
    label: str = ""


@dataclass(kw_only=True)
class Lane:
    """One rollout."""

    rollout: Rollout
    segments: list[Segment] = field(default_factory=list)
    is_slow: bool = False
    """True for the slowest rollouts."""
    is_stuck: bool = False

    @property
    def stop(self) -> float:
        return max((segment.stop for segment in self.segments), default=0.0)

    @property
    def seconds(self) -> float:
        """Duration without the wait for its turn."""
        return self.stop - min((item.start for item in self.segments if item.kind != "wait"), default=self.stop)

    def total(self, kind: Kind) -> float:
        """Return the seconds of one kind; parallel calls add up."""
        return sum(item.stop - item.start for item in self.segments if item.kind == kind)


def timeline(rollouts: Sequence[Rollout], traces_of: dict[str, list[Trace]], *, now: float | None = None) -> list[Lane]:
    """Return a lane for each rollout, in order of their start.

    Args:
        rollouts: rollouts of one step.
        traces_of: traces by session.
        now: Unix seconds.
    """
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


def _lane(rollout: Rollout, traces: Sequence[Trace], began: float, now: float) -> Lane:
    lane = Lane(rollout=rollout)
    start = rollout.created_at - began
    if start > 0.001:
        lane.segments.append(Segment(kind="wait", start=0.0, stop=start))
    at = start
    for trace in sorted(traces, key=lambda item: item.started_at):
        asked = max(trace.started_at - began, start)
        if asked > at:
            lane.segments.append(Segment(kind="tool", start=at, stop=asked))
        answered = asked + trace.timings.get("total_s", 0.0)
        queued = min(trace.timings.get("queue_s", 0.0), answered - asked)
        if queued > 0:
            lane.segments.append(Segment(kind="queue", start=asked, stop=asked + queued))
        lane.segments.append(
            Segment(kind="model", start=asked + queued, stop=answered, label=counted(len(trace.response_ids), "token"))
        )
        at = max(at, answered)
    end = start + rollout.seconds if rollout.seconds is not None else None
    if end is not None and end > at:
        lane.segments.append(Segment(kind="reward", start=at, stop=end))
    timed_out = rollout.ended == "timeout"
    lane.is_stuck = timed_out or (not rollout.has_ended and now - began - at > _STUCK_S)
    return lane
