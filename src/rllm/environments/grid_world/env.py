"""`GridWorldEnv`: FrozenLake in text, one move a turn."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Self

from rllm.environments.base.action import unwrapped
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.grid_world.map import MOVES, Cell, GridMap, random_map
from rllm.errors import ConfigError

LEGEND = "P: you, _: ice, O: hole, G: goal, X: you in a hole, *: you at the goal"
_SIDEWAYS = {"Up": ("Left", "Right"), "Down": ("Left", "Right"), "Left": ("Up", "Down"), "Right": ("Up", "Down")}
_NUMBERED = {"1": "Left", "2": "Down", "3": "Right", "4": "Up"}
"""As agents of the rLLM framework number them."""
_SETTINGS: dict[str, type] = {"seed": int, "size": int, "p": float, "is_slippery": bool, "max_steps": int}


class GridWorldEnv(BaseEnv):
    """Reward 1 at the goal and 0 elsewhere; a hole ends the rollout, and so does step `max_steps` (`info["truncated"]`).

    The same seed gives the same map, which can always be solved in time, and the same slips. An action that is no
    direction moves nothing, costs a step, and is answered with the directions there are. The rules are those of
    FrozenLake (https://gymnasium.farama.org/environments/toy_text/frozen_lake/), but start and goal are anywhere.
    """

    def __init__(
        self, *, seed: int = 0, size: int = 4, p: float = 0.8, is_slippery: bool = False, max_steps: int | None = None
    ) -> None:
        """`p` is the probability of a cell to be ice; `max_steps` is 4 * `size` where it is not given.

        On slippery ice, a move goes where it was meant to with probability 1/3, and to either side with 1/3.

        Raises:
            ConfigError: if `size`, `p` or `max_steps` is out of range.
        """
        self.seed = seed
        self.is_slippery = is_slippery
        self.max_steps = 4 * size if max_steps is None else max_steps
        self.grid: GridMap = random_map(seed, size=size, p=p, max_steps=self.max_steps)
        self.position: Cell = self.grid.start
        self.num_steps = 0
        self._slips = self._new_slips()

    @classmethod
    def from_dict(cls, info: Mapping[str, Any]) -> Self:
        """The environment of a task with any of `seed`, `size`, `p`, `is_slippery` and `max_steps`; the rest is ignored.

        Raises:
            ConfigError: if a value has the wrong type, or is out of range.
        """
        given = {key: info[key] for key in _SETTINGS if info.get(key) is not None}
        return cls(**{key: _converted(key, value) for key, value in given.items()})

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Go back to the start of the same map."""
        self.position = self.grid.start
        self.num_steps = 0
        self._slips = self._new_slips()
        return self.render(), {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Move `Up`, `Down`, `Left` or `Right`, in any case of letters; or by number, from 1: left, down, right, up."""
        action = unwrapped(action)
        move = _direction(action)
        self.num_steps += 1
        if move:
            self.position = self.grid.move(self.position, MOVES[self._slip(move)])
        at_goal = self.position == self.grid.goal
        ended = at_goal or self.position in self.grid.holes
        truncated = not ended and self.num_steps >= self.max_steps
        info = {"is_valid": bool(move), "num_steps": self.num_steps, "truncated": truncated}
        observation = self.render() if move else f"{_refusal(action)}\n{self.render()}"
        return observation, float(at_goal), ended or truncated, info

    def render(self) -> str:
        """The grid, one row a line, and the legend."""
        cells = range(self.grid.size)
        rows = [" ".join(self._symbol((row, column)) for column in cells) for row in cells]
        return "\n".join([*rows, LEGEND])

    def _new_slips(self) -> random.Random:
        return random.Random(f"slips of {self.seed}")  # not the map's generator: slips never change the map

    def _slip(self, move: str) -> str:
        return self._slips.choice((move, *_SIDEWAYS[move])) if self.is_slippery else move

    def _symbol(self, cell: Cell) -> str:
        here = cell == self.position
        if cell in self.grid.holes:
            return "X" if here else "O"
        if cell == self.grid.goal:
            return "*" if here else "G"
        return "P" if here else "_"


def _converted(key: str, value: Any) -> Any:
    convert = _SETTINGS[key]
    wrong = ConfigError(f"{key}={value!r}: use a value of type {convert.__name__}")
    try:
        number = json.loads(value.lower()) if isinstance(value, str) else value  # a CSV file's cells are text
        converted = convert(number)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if converted != number:
        raise wrong
    return converted


def _direction(action: Any) -> str:
    """The name of a direction, or nothing."""
    name = str(action).strip().capitalize()
    name = _NUMBERED.get(name, name)
    return name if name in MOVES else ""


def _refusal(action: Any) -> str:
    return f"{str(action)[:80]!r} is no action: use one of {', '.join(MOVES)}."
