"""Agents that change the streams of the whole program take nothing of what it prints."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from rllm.cli import terminal
from rllm.engine.runner import Attempt, RolloutRunner
from rllm.engine.streams import streams_kept
from rllm.types import Episode


class RunsCode:
    """As tools do that run code, two at a time: the one that began first ends first, and leaves the other's buffer behind."""

    def __init__(self) -> None:
        self.both = asyncio.Barrier(2)
        self.first_is_done = asyncio.Event()
        self.logged_to: list[object] = []

    async def rollout(self, attempt: Attempt) -> Episode:
        if attempt.index == 1:
            await self.both.wait()
        with io.StringIO() as said, redirect_stdout(said), redirect_stderr(said):
            if attempt.index == 0:
                await self.both.wait()
                await asyncio.sleep(0)  # the other has begun
            else:
                await self.first_is_done.wait()
        self.first_is_done.set()
        self.logged_to.append(getattr(logging.lastResort, "stream", None))
        return Episode(task=attempt.task)


async def test_what_agents_leave_behind_is_put_right(capsys: pytest.CaptureFixture[str]) -> None:
    rollout, before, last_resort = RunsCode(), (sys.stdout, sys.stderr), logging.lastResort
    console = terminal.console(stderr=True)
    with streams_kept():
        await RolloutRunner(rollout).run([Attempt(task={}, task_id="a", index=index) for index in (0, 1)])
        assert sys.stderr is not before[1], "the agents of this test must leave something behind"
        console.print("step 1")
        assert rollout.logged_to == [before[1], before[1]]
    assert (sys.stdout, sys.stderr, logging.lastResort) == (*before, last_resort)
    assert capsys.readouterr() == ("", "step 1\n")


async def test_it_lasts_as_long_as_rollouts() -> None:
    before = sys.stdout, sys.stderr
    await RolloutRunner(RunsCode()).run([Attempt(task={}, task_id="a", index=index) for index in (0, 1)])
    assert (sys.stdout, sys.stderr) == before
