"""Players of a game: the policy, another model or random moves, each with its own conversation."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import openai

from rllm.errors import ConfigError, EnvError
from rllm.sdk import get_chat_client_async
from rllm.types import JSONMapping, Message, Step

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
        """Return what tasks ask for in their column `past_policies`; `None` if no task does."""
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
