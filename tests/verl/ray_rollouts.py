"""Rollouts that do what their task asks for, run in Ray's processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rllm.engine.request import RolloutRequest
from rllm.errors import InferenceError, TokenMismatchError
from rllm.types import Episode, Step, Trajectory


class Doing:
    """Source of rollouts, each of which writes a line to `log`, if there is one, when it starts."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.log is not None:
            self.log.with_name(f"closed-{os.getpid()}").touch()

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        self._note(attempt)
        task = attempt.task
        await asyncio.sleep(task.get("sleep", 0.0))
        if "do" in task:
            getattr(self, task["do"])(attempt)
        path = Trajectory(reward=1.0, steps=[Step(response_ids=list(range(task.get("num_tokens", 4))))])
        path.info["value"] = threading.Lock() if task.get("do") == "hold_a_lock" else os.getpid()
        return Episode(task_id=attempt.task_id, index=attempt.index, session_id=attempt.session_id, trajectories=[path])

    def _note(self, attempt: RolloutRequest) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{attempt.task_id} {os.getpid()} {attempt.session_id}\n")

    def die(self, attempt: RolloutRequest) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def block(self, attempt: RolloutRequest) -> None:
        time.sleep(3600)

    def mismatch(self, attempt: RolloutRequest) -> None:
        raise TokenMismatchError("3 ids and 2 log-probabilities")

    def respond_busy_once(self, attempt: RolloutRequest) -> None:
        if not attempt.task["mark"].exists():
            attempt.task["mark"].touch()
            raise InferenceError("busy", status_code=503)

    def hold_a_lock(self, attempt: RolloutRequest) -> None:
        """Do nothing: `rollout` returns a lock, which cannot be sent."""


def opening(log: Path | None) -> Any:
    """Return the rollout function of each process, by its import path."""
    return Doing(log)
