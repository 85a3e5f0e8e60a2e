"""A user of a gateway: asks, reads the answer, and then rewards it."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import offline
from openai import OpenAI, OpenAIError

NUM_USERS = 16


class User:
    """User who talks to the gateway at a URL, with the key of the program that they use."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        self._gateway = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=600)
        self._rng = random.Random(seed)

    def __enter__(self) -> User:
        return self

    def __exit__(self, *_: object) -> None:
        self._gateway.close()

    def talk(self) -> float:
        """Ask a question in a new session, and reward the answer."""
        asked, wanted = offline.question(self._rng)
        session = self._gateway.post("/sessions", json={}).raise_for_status().json()
        with OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            text = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": asked}], max_tokens=12
            )
        reward = float(text.choices[0].message.content == wanted)
        self._gateway.post(f"/sessions/{session['id']}/reward", json={"reward": reward}).raise_for_status()
        return reward

    def talk_until(self, stopped: Event) -> None:
        """Talk until `stopped` is set; while the gateway does not answer, try again."""
        with self:
            while not stopped.is_set():
                try:
                    self.talk()
                except (httpx.HTTPError, OpenAIError):  # the gateway is starting, or has stopped
                    stopped.wait(0.2)


def talking(url: str, key: str, stopped: Event) -> Callable[[], None]:
    """Start users that talk until `stopped` is set, and return a function that waits for them."""
    pool = ThreadPoolExecutor(NUM_USERS)
    for seed in range(NUM_USERS):
        pool.submit(User(url, key, seed).talk_until, stopped)
    return pool.shutdown
