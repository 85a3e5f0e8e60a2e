"""How a rollout ended, as the trainer noted it with its session; what anybody else put there is checked before it is shown."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, ValidationError, convert, field


class StepTold(Struct, kw_only=True, gc=False):
    """What was kept of one step."""

    id: str
    """Of its call's trace."""
    reward: float | None = None
    advantage: float | None = None
    drift: str | None = None
    """Why its prompt did not go on from what was sampled."""


class Path(Struct, kw_only=True, gc=False):
    """What one agent did in a rollout: a trajectory in short."""

    name: str = ""
    reward: float | None = None
    advantage: float | None = None
    dropped: str | None = None
    trainable: bool = True
    truncated: bool = False
    num_tokens: int = 0
    tools: list[str] = []
    steps: list[StepTold] = []


class Outcome(Struct, kw_only=True, gc=False):
    """How a rollout ended. There are very many, and none has a cycle for the garbage collector to look for."""

    ended: str | None = None
    is_correct: Any = False
    """As the agent says: true, or what counts as such."""
    error: dict[str, str] | None = None
    warnings: list[str] = []
    metrics: dict[str, Any] = {}
    paths: list[Path] = field(default=[], name="trajectories")


def read_outcome(told: object) -> tuple[Outcome, str | None]:
    """What the metadata of a session say of its end, and what is wrong with them where they are of another form."""
    try:
        return convert(told, Outcome), None
    except ValidationError as error:
        return Outcome(), str(error)
