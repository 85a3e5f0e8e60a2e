"""Run another program as part of an agent: its model calls are those of the session that it is started in.

async def agent(task: str) -> float:
    done = await run_program_async(["claude", "-p", task], timeout_s=600)
    return grade(done.stdout)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rllm._runtime.threads import in_thread
from rllm.errors import RLLMError
from rllm.sdk.context import Frame, current_frame, has_outlived_rollout
from rllm.sdk.propagation import program_environment
from rllm.sdk.supervised import Argument, Limits, ProgramResult, run_supervised
from rllm.sdk.variables import without_operators_keys


def run_program(
    command: Sequence[Argument],
    *,
    timeout_s: float | None = None,
    max_output_bytes: int = 1_000_000,
    cwd: Argument | None = None,
    env: Mapping[str, Argument] | None = None,
    input: str = "",
    grace_s: float = 5.0,
) -> ProgramResult:
    """Run a program with the environment of the current session, and end all that it started when it ends.

    Its clients find the session's gateway by `rllm.sdk.environment()`; outside of a rollout it gets the environment as it is.
    A program that outlives its rollout is ended, with everything it started. For sync code; see `run_program_async`.

    Args:
        command: the program and its arguments; no shell is between.
        timeout_s: after which it is ended; `None` leaves that to the rollout's own time limit.
        max_output_bytes: how much is kept of its stdout, and of its stderr: half of it from the beginning, half from the end.
        cwd: the folder that it is started in; else the current one.
        env: variables besides those of this process and of the session, which they overrule.
        input: what it reads from stdin.
        grace_s: how long its processes have between SIGTERM and SIGKILL.

    Raises:
        ConfigError: if it cannot be started.
        RLLMError: if this is a thread or task that goes on although its rollout has ended.
    """
    limits = Limits(timeout_s=timeout_s, max_output_bytes=max_output_bytes, grace_s=grace_s)
    return _prepared(command, limits, cwd=cwd, env=env, input=input)(lambda: False)


async def run_program_async(
    command: Sequence[Argument],
    *,
    timeout_s: float | None = None,
    max_output_bytes: int = 1_000_000,
    cwd: Argument | None = None,
    env: Mapping[str, Argument] | None = None,
    input: str = "",
    grace_s: float = 5.0,
) -> ProgramResult:
    """As `run_program`, without blocking the event loop. Cancelling it ends the program.

    Raises:
        ConfigError: if it cannot be started.
        RLLMError: if this is a thread or task that goes on although its rollout has ended.
    """
    limits = Limits(timeout_s=timeout_s, max_output_bytes=max_output_bytes, grace_s=grace_s)
    cancelled = threading.Event()
    run = _prepared(command, limits, cwd=cwd, env=env, input=input)
    try:
        return await in_thread(partial(run, cancelled.is_set), name=f"program {_program(command)}")
    except asyncio.CancelledError:
        cancelled.set()
        raise


def _prepared(
    command: Sequence[Argument], limits: Limits, *, cwd: Argument | None, env: Mapping[str, Argument] | None, input: str
) -> Callable[[Callable[[], bool]], ProgramResult]:
    """The program, to be run in the session that is open now, until a function says that it is cancelled."""
    if has_outlived_rollout():
        raise RLLMError(
            f"{_program(command)!r} is not started: the rollout that this thread or task was begun in has ended, and with it all that "
            "it had started"
        )
    frame = current_frame()
    variables = dict(os.environ)
    if frame is not None:
        frame.note_program(_program(command))
        if led := program_environment(frame):
            variables = {**without_operators_keys(variables), **led}
    given = {**variables, **(env or {})}

    def run(is_cancelled: Callable[[], bool]) -> ProgramResult:
        def is_wanted() -> bool:
            return not is_cancelled() and _is_open(frame)

        return run_supervised(command, limits, env=given, cwd=cwd, stdin=input, is_wanted=is_wanted)

    return run


def _program(command: Sequence[Argument]) -> str:
    """What is started; empty for an empty command, which is refused when it is run."""
    return str(command[0]) if command else ""


def _is_open(frame: Frame | None) -> bool:
    """Whether the rollout is still under way: a thread that was left behind may hold sessions open inside of it."""
    return frame is None or all(entered.session.is_open for entered in frame)
