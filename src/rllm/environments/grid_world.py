"""`GridWorldEnv`: FrozenLake in text, one move a turn, on random maps that can always be solved."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from rllm.environments.base.base_env import BaseEnv, unwrapped
from rllm.errors import ConfigError
from rllm.types import JSONMapping, JSONObject

Cell: TypeAlias = tuple[int, int]
"""(row, column), from the top left."""

MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

LEGEND = "P: you, _: ice, O: hole, G: goal, X: you in a hole, *: you at the goal"
_SIDEWAYS = {"Up": ("Left", "Right"), "Down": ("Left", "Right"), "Left": ("Up", "Down"), "Right": ("Up", "Down")}
# Numbers that agents of the rLLM framework use.
_NUMBERED = {"1": "Left", "2": "Down", "3": "Right", "4": "Up"}
_SETTINGS: dict[str, type] = {"seed": int, "size": int, "p": float, "is_slippery": bool, "max_steps": int}


class GridWorldEnv(BaseEnv):
    """Reward 1 at the goal and 0 elsewhere; a hole ends the rollout, and so does step `max_steps`.

    In the latter case `info["truncated"]` is true. The same seed gives the same map, which can be solved within
    `max_steps`, and the same slips. An action that is not a direction moves nothing, costs a step, and is answered with
    the list of directions. It has the rules of FrozenLake
    (https://gymnasium.farama.org/environments/toy_text/frozen_lake/), but start and goal are anywhere.
    """

    def __init__(
        self, *, seed: int = 0, size: int = 4, p: float = 0.8, is_slippery: bool = False, max_steps: int | None = None
    ) -> None:
        """Draw the map.

        Args:
            seed: seed of the map and of the slips.
            size: cells along each side.
            p: probability that a cell is ice.
            is_slippery: go in the intended direction with probability 1/3, and to either side with 1/3 each.
            max_steps: 4 * `size` by default.

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
    def from_dict(cls, info: JSONMapping) -> Self:
        """Return the environment of a task with any of `seed`, `size`, `p`, `is_slippery` and `max_steps`.

        Other keys are ignored.

        Raises:
            ConfigError: if a value has the wrong type, or is out of range.
        """
        given = {key: info[key] for key in _SETTINGS if info.get(key) is not None}
        return cls(**{key: _converted(key, value) for key, value in given.items()})

    @classmethod
    def argument_names(cls) -> Collection[str]:
        """Return the constructor's arguments."""
        return list(_SETTINGS)

    def reset(self) -> tuple[str, JSONObject]:
        """Return to the start of the same map."""
        self.position = self.grid.start
        self.num_steps = 0
        self._slips = self._new_slips()
        return self.render(), {}

    def step(self, action: Any) -> tuple[str, float, bool, JSONObject]:
        """Move `Up`, `Down`, `Left` or `Right`, in any letter case, or by number: 1 left, 2 down, 3 right, 4 up."""
        action = unwrapped(action)
        name = str(action).strip().capitalize()
        name = _NUMBERED.get(name, name)
        move = name if name in MOVES else ""
        self.num_steps += 1
        if move:
            if self.is_slippery:
                move = self._slips.choice((move, *_SIDEWAYS[move]))
            self.position = self.grid.move(self.position, MOVES[move])
        at_goal = self.position == self.grid.goal
        ended = at_goal or self.position in self.grid.holes
        truncated = not ended and self.num_steps >= self.max_steps
        info = {"is_valid": bool(move), "num_steps": self.num_steps, "truncated": truncated}
        refusal = "" if move else f"{str(action)[:80]!r} is not an action: use one of {', '.join(MOVES)}.\n"
        return refusal + self.render(), float(at_goal), ended or truncated, info

    def render(self) -> str:
        """Return the grid, one row per line, and the legend."""
        cells = range(self.grid.size)
        rows = [" ".join(self._symbol((row, column)) for column in cells) for row in cells]
        return "\n".join([*rows, LEGEND])

    def _new_slips(self) -> random.Random:
        return random.Random(f"slips of {self.seed}")  # not the map's generator: slips never change the map

    def _symbol(self, cell: Cell) -> str:
        here = cell == self.position
        if cell in self.grid.holes:
            return "X" if here else "O"
        if cell == self.grid.goal:
            return "*" if here else "G"
        return "P" if here else "_"


def _converted(key: str, value: object) -> Any:
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


@dataclass(frozen=True, kw_only=True)
class GridMap:
    """A square of ice with holes, a start and a goal."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell] = frozenset()

    def move(self, cell: Cell, direction: Cell) -> Cell:
        """Return the cell that a move leads to; a move off the grid leads to the same cell."""
        row, column = cell[0] + direction[0], cell[1] + direction[1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell


def random_map(seed: int, *, size: int, p: float, max_steps: int) -> GridMap:
    """Return the map of a seed: each cell is ice with probability `p`, and the goal at most `max_steps` moves away.

    Maps are drawn until one has such a path. This terminates because start and goal may be neighbours.

    Raises:
        ConfigError: if `size` is not in 2..64, `p` not in 0..1, or `max_steps` less than 1.
    """
    _require(2 <= size <= 64, f"size={size!r}: use 2 to 64")
    _require(0.0 <= p <= 1.0, f"p={p!r}: use a probability from 0 to 1")
    _require(max_steps >= 1, f"max_steps={max_steps!r}: use at least 1")
    rng = random.Random(seed)
    cells = [(row, column) for row in range(size) for column in range(size)]
    while True:
        start, goal = rng.sample(cells, 2)
        holes = frozenset(cell for cell in cells if rng.random() >= p) - {start, goal}
        grid = GridMap(size=size, start=start, goal=goal, holes=holes)
        if num_moves(grid, at_most=max_steps) is not None:
            return grid


def num_moves(grid: GridMap, *, at_most: int) -> int | None:
    """Return the length of the shortest path from start to goal, or `None` if it exceeds `at_most` moves."""
    seen = {grid.start}
    frontier = deque([(grid.start, 0)])
    while frontier:
        cell, length = frontier.popleft()
        if cell == grid.goal:
            return length
        if length < at_most:
            following = {grid.move(cell, direction) for direction in MOVES.values()} - seen - grid.holes
            seen |= following
            frontier.extend((neighbour, length + 1) for neighbour in following)
    return None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
