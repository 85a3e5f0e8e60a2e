"""`textarena:TicTacToe-v0`: games of TextArena for one or more players, by self-play or against an opponent.

Each seat of the policy is a conversation and a trajectory, named `player_0`, `player_1`, ...; its reward is
the game's. Moves of an opponent are part of what the policy observes, and are not trained on.
"""

from __future__ import annotations

import random
import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import openai

from rllm._runtime.threads import in_thread
from rllm.data.dataset import Dataset
from rllm.environments.named import NamedEnvironment, take_whole_number, values_of
from rllm.errors import ConfigError, EnvError, boundary, needed
from rllm.registry import did_you_mean
from rllm.sdk import get_chat_client_async
from rllm.sdk.context import SESSION_UID
from rllm.types import Episode, JSONMapping, JSONObject, Message, Step, TerminationReason, Trajectory

_NUM_PLAYERS = (2, 1, 3, 4, 5, 6, 7, 8)
"""Numbers of players that are tried if none is given."""
_random_lock = threading.Lock()
"""Held while a game runs, because games share Python's global generator."""


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the games of a name, with one task for each seed.

    Args:
        name: an id that TextArena registers, such as `TicTacToe-v0`.
        params: `size` (100) and `seed` (0) of the tasks; `players`; `max_turns` (100), after which a game is unscored;
            `opponent`: self (the default), random, start (the policy that the run began with), pool (snapshots of the
            policy `every` 10 steps, the newest `keep` 4 of them), or the URL of a server with its `opponent_model`;
            `seat` of the policy, by default each in turn. Others are passed to the game, as JSON or text.

    Raises:
        ConfigError: if the game or a parameter is unknown or does not fit.
        MissingDependencyError: if textarena is not installed.
    """
    own = dict(params)
    size, seed = take_whole_number(own, "size", 100, least=1), take_whole_number(own, "seed", 0)
    players, seat = take_whole_number(own, "players", 0), take_whole_number(own, "seat", -1, least=-1)
    max_turns = take_whole_number(own, "max_turns", 100, least=1)
    opponent, model = own.pop("opponent", SELF), own.pop("opponent_model", None)
    check_opponent(opponent, model)
    past = None
    if opponent == POOL:
        every, keep = take_whole_number(own, "every", 10, least=1), take_whole_number(own, "keep", 4, least=1)
        past = {"every": every, "keep": keep}
    elif opponent == START:
        past = {"every": 0, "keep": 1}
    game: JSONObject = {"game": _registered(name), "options": values_of(own)}
    game["num_players"] = _num_players(game, [players] if players else _NUM_PLAYERS)
    _check_seat(seat, game["num_players"], opponent)
    if opponent == RANDOM and not listed_moves(str(Game(**game, seed=seed).observe()[1])):
        raise ConfigError(f"opponent=random: {name} lists no moves to choose from; use opponent=self or a model")
    shared = {**game, "max_turns": max_turns, "opponent": opponent, "opponent_model": model, "past_policies": past}
    tasks = [
        {
            "id": f"{name}/{seed + place}",
            **shared,
            "seed": seed + place,
            "seat": place % game["num_players"] if seat < 0 else seat,
        }
        for place in range(size)
    ]
    return NamedEnvironment(tasks=Dataset(tasks), agent_run_func=play)


async def play(**task: Any) -> Episode:
    """Play the game of a task to its end.

    Returns an episode with a trajectory for each seat of the policy.
    """
    fields = ("game", "options", "num_players", "seed")
    game = await in_thread(lambda: Game(**{name: task[name] for name in fields}), name=f"start of {task['game']}")
    is_trained = [task["opponent"] == SELF or player == task["seat"] for player in range(task["num_players"])]
    seats = [Seat(policy if trained else opponent_of(task)) for trained in is_trained]
    while not game.done and game.num_turns < task["max_turns"]:
        player, observed = game.observe()
        game.move(await seats[player].answer(observed))
    trained = {player: seat for player, seat in enumerate(seats) if is_trained[player]}
    return _episode(game, trained, is_against=task["opponent"] != SELF)


class Game:
    """One game at TextArena, with its own random numbers."""

    def __init__(self, *, game: str, options: JSONMapping, num_players: int, seed: int) -> None:
        """Start the game; raise `EnvError` if TextArena raises."""
        self.name = game.removesuffix("-raw")
        self.done = False
        self.num_turns = 0
        self.num_invalid = [0] * num_players
        """Moves of each player that the game did not accept."""
        self._generator = random.Random(seed).getstate()
        textarena = _textarena()
        with self._at_work("reset"):
            self._env = textarena.make(game, **options)
            self._env.reset(num_players=num_players, seed=seed)

    @contextmanager
    def _at_work(self, method: str) -> Iterator[None]:
        with _random_lock, boundary(EnvError, f"{self.name}.{method}"):
            others = random.getstate()
            random.setstate(self._generator)
            try:
                yield
            finally:
                self._generator = random.getstate()
                random.setstate(others)

    def observe(self) -> tuple[int, str | list[str]]:
        """Return the player to move, and the messages since that player's last move, or a text: the whole state."""
        with self._at_work("get_observation"):
            player, observed = self._env.get_observation()
        if isinstance(observed, str):
            return player, observed
        roles = self._env.state.role_mapping
        return player, [
            text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in observed
            if sender != player
        ]

    def move(self, text: str) -> None:
        """Make a move of the player whose turn it is; TextArena decides the penalty for an invalid one."""
        state = self._env.state
        player, before = state.current_player_id, getattr(state, "error_count", 0)
        was_out = state.game_info[player].get("invalid_move", False)
        with self._at_work("step"):
            self.done, _ = self._env.step(text)
        is_out = state.game_info[player].get("invalid_move", False) and not was_out
        self.num_turns += 1
        self.num_invalid[player] += is_out or getattr(state, "error_count", 0) > before

    def rewards(self) -> Mapping[int, float]:
        """Return the reward of each player; empty if the game has not ended."""
        with self._at_work("close"):
            rewards, _ = self._env.close()
        return rewards if self.done and rewards else {}


def _episode(game: Game, seats: Mapping[int, Seat], *, is_against: bool) -> Episode:
    rewards = game.rewards()
    trajectories = [
        Trajectory(
            name=f"player_{player}",
            steps=seat.steps,
            reward=float(rewards[player]) if player in rewards else None,
            trainable=bool(seat.steps),  # the others may have lost before it had a turn
            info={
                "game": game.name,
                "num_invalid_moves": game.num_invalid[player],
                SESSION_UID: seat.uid,  # calls without a step are another seat's
            },
        )
        for player, seat in seats.items()
    ]
    metrics = {
        "game/turns": float(game.num_turns),
        "game/invalid_moves": float(sum(game.num_invalid[player] for player in seats)),
        "game/unfinished": float(not game.done),
    }
    result = sum(rewards.get(player, 0) for player in seats)
    if is_against:
        metrics |= {"game/win": float(result > 0), "game/draw": float(game.done and result == 0)}
    ended = TerminationReason.ENV_DONE if game.done else TerminationReason.MAX_TURNS_EXCEEDED
    return Episode(trajectories=trajectories, metrics=metrics, is_correct=result > 0, termination_reason=ended)


def _textarena() -> Any:
    with needed("textarena", "textarena", "textarena:NAME"):
        import textarena
    return textarena


def names() -> list[str]:
    """Return the names of all games."""
    known = _textarena().envs.registration.ENV_REGISTRY
    return sorted(name for name in known if not name.endswith("-raw"))


def _registered(name: str) -> str:
    """Return the id of the game without wrappers, if it has one: a seat's messages then only ever grow."""
    known = _textarena().envs.registration.ENV_REGISTRY
    if f"{name}-raw" in known:
        return f"{name}-raw"
    if name not in known:
        hint = did_you_mean(name, names()) or "`rllm list envs textarena` prints them"
        raise ConfigError(f"{name!r} is not a game of TextArena: {hint}")
    return name


def _num_players(game: JSONObject, candidates: Sequence[int]) -> int:
    """Return the first number of players with which the game starts."""
    failures = []
    for number in candidates:
        try:
            Game(**game, num_players=number, seed=0)
        except EnvError as failure:
            failures.append(failure)
        else:
            return number
    raise ConfigError(f"textarena: {failures[0]}")


def _check_seat(seat: int, num_players: int, opponent: str) -> None:
    if opponent != SELF and num_players == 1:
        raise ConfigError(f"opponent={opponent!r}: the game has one player; leave it out")
    if seat >= num_players or (seat >= 0 and opponent == SELF):
        remedy = (
            "in self-play the policy has all seats; leave it out" if opponent == SELF else f"use 0 to {num_players - 1}"
        )
        raise ConfigError(f"seat={seat}: {remedy}")


SELF, RANDOM, START, POOL = "self", "random", "start", "pool"
POOL_MODEL, START_MODEL = "opponent", "opponent/start"
"""Names of models that a run answers with an earlier policy: see `rllm.trainer.opponents`."""
_LIST_OF_MOVES = re.compile(r"(?:available|valid|legal) (?:moves|actions)[^:\n]*:", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]]+\]")
Player: TypeAlias = Callable[[list[Message]], Awaitable[tuple[str, str | None]]]
"""Function from a conversation to a move, and the id of the model call that chose it."""


@dataclass(frozen=True, kw_only=True)
class PastPolicies:
    """Earlier policies of a training run that serve as opponents."""

    every: int = 0
    """Training steps between snapshots; 0 for the starting policy alone."""
    keep: int = 1
    """Number of newest snapshots to draw from, with equal probability."""

    @classmethod
    def of(cls, tasks: Iterable[JSONMapping]) -> PastPolicies | None:
        """Return the past policies that tasks ask for in their column `past_policies`; `None` if no task does."""
        asked = [found for task in tasks if (found := task.get("past_policies"))]
        return cls(**max(asked, key=lambda found: found["every"])) if asked else None


class Seat:
    """Conversation of one player with the game."""

    def __init__(self, player: Player) -> None:
        self.uid = uuid.uuid4().hex
        self.steps: list[Step] = []
        self._player = player
        self._messages: list[Message] = []

    async def answer(self, observed: str | Sequence[str]) -> str:
        """Return the player's move; a text, which is the whole state, begins a new conversation."""
        if isinstance(observed, str):
            self._messages, observed = [], [observed]
        self._messages.append({"role": "user", "content": "\n".join(observed)})
        text, call_id = await self._player(self._messages)
        self._messages.append({"role": "assistant", "content": text})
        if call_id is not None:
            self.steps.append(Step(id=call_id))
        return text


def opponent_of(task: JSONMapping) -> Player:
    """Return the player that the `opponent` of a task names."""
    kind, seed = task["opponent"], task["seed"]
    if kind == RANDOM:
        return lambda messages: _random_move(messages, seed)
    if kind in (START, POOL):
        return lambda messages: _ask(messages, START_MODEL if kind == START else POOL_MODEL)
    return lambda messages: _ask(messages, task["opponent_model"], kind)


def policy(messages: list[Message]) -> Awaitable[tuple[str, str]]:
    """Return the policy's answer and the id of the call."""
    return _ask(messages, "policy")


async def _ask(messages: list[Message], model: str, url: str | None = None) -> tuple[str, str]:
    try:
        response: Any = await _client(url).chat.completions.create(model=model, messages=messages)
    except openai.OpenAIError as error:
        if url is None:
            raise
        raise EnvError(f"opponent={url!r} gave no answer: {error}") from error
    return response.choices[0].message.content or "", response.id


@cache
def _client(url: str | None) -> Any:
    """Return the client of a run's models, or of another server."""
    return get_chat_client_async() if url is None else get_chat_client_async(base_url=url, use_proxy=False)


async def _random_move(messages: list[Message], seed: int) -> tuple[str, None]:
    """Return one of the moves that the game lists, drawn by the seed and the game so far."""
    moves = listed_moves(str(messages[-1]["content"]))
    if not moves:
        raise EnvError("opponent=random: the game lists no moves at this point; use another opponent")
    return random.Random(f"{seed} {messages}").choice(moves), None


def listed_moves(observed: str) -> list[str]:
    """Return the moves of the last list in an observation, such as `Available Moves: '[0]', '[4]'`."""
    lists = _LIST_OF_MOVES.split(observed)
    return _MOVE.findall(lists[-1]) if len(lists) > 1 else []


def check_opponent(opponent: str, model: str | None) -> None:
    """Raise `ConfigError` for an unknown opponent, or one whose model is missing or has no use."""
    is_url = opponent.startswith(("http://", "https://"))
    if not is_url and opponent not in (SELF, RANDOM, START, POOL):
        raise ConfigError(f"opponent={opponent!r}: use self, random, start, pool, or the URL of a server")
    if is_url and model is None:
        raise ConfigError(f"opponent={opponent!r}: add opponent_model=NAME, the model of that server")
    if model is not None and not is_url:
        raise ConfigError(f"opponent_model={model!r} would have no effect with opponent={opponent!r}: leave it out")
