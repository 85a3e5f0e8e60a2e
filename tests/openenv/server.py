"""Server of an environment, made with OpenEnv: `python server.py text|json|tools|spell PORT SESSIONS`.

It exits after half an hour.
"""

import os
import random
import sys
import threading
from string import ascii_lowercase
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Answer(Action):
    word: str


class Move(Action):
    by: int
    times: int = 1


class Prompt(Observation):
    text: str


class Position(Observation):
    position: int
    goal: int


class Walk(Environment):
    """Walk from a start that depends on the seed to a goal; the last step is worth 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, goal: int = 10) -> Observation:
        if goal < 0:
            raise ValueError("goal is below 0")
        self.position, self.goal, self.count = random.Random(seed).randint(0, 5), goal, 0
        return self._observation()

    def step(self, action: Any, timeout_s: float | None = None) -> Observation:
        self.count += 1
        if isinstance(action, Move):
            self.position += action.by * action.times
        elif action.word == "fall":
            raise ValueError("fell off the path")
        elif action.word.isdigit():
            self.position += int(action.word)
        return self._observation()

    def _observation(self) -> Observation:
        done = self.position >= self.goal
        return Position(position=self.position, goal=self.goal, done=done, reward=1.0 if done else 0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


class WalkInWords(Walk):
    def _observation(self) -> Observation:
        found = super()._observation()
        return Prompt(
            text=f"You are at {self.position} of {self.goal}. Answer with a number of steps.",
            done=found.done,
            reward=found.reward,
        )


class Spell(Environment):
    """List the letters from one to another, which depend on the seed, in one answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        rng = random.Random(seed)
        count, stop = rng.randint(2, 6), rng.randint(8, 26)
        self.answer = " ".join(ascii_lowercase[stop - count : stop])
        return Prompt(text=f"{self.answer[0]} to {self.answer[-1]}", done=False)

    def step(self, action: Answer, timeout_s: float | None = None) -> Observation:
        return Prompt(text="", done=True, reward=float(action.word == self.answer))

    @property
    def state(self) -> State:
        return State(step_count=0)


class Safe(MCPEnvironment):
    """A safe with a number that a tool returns; opening it is worth 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("safe")
        self.number, self.is_open = 0, False

        @server.tool
        def look() -> int:
            """Return the number of the safe."""
            return self.number

        @server.tool
        def open_safe(number: int) -> str:
            """Open the safe."""
            if number != self.number:
                raise ValueError("wrong number")
            self.is_open = True
            return "open"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.number = 100 + (seed or 0)
        return Prompt(text="Open the safe.")

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._scored(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._scored(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _scored(self, observation: Observation) -> Observation:
        if isinstance(observation, CallToolObservation):
            observation.done, observation.reward = self.is_open, float(self.is_open)
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("use a tool")

    @property
    def state(self) -> State:
        return State(step_count=0)


KINDS = {
    "text": (WalkInWords, Answer, Prompt),
    "spell": (Spell, Answer, Prompt),
    "json": (Walk, Move, Position),
    "tools": (Safe, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port, sessions = sys.argv[1:]
    threading.Timer(1800, os._exit, (3,)).start()
    app = create_fastapi_app(*KINDS[kind], max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
