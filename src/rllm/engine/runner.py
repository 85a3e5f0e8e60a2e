"""Run many rollouts at once, with limits, retries and deadlines, isolated from each other.

A `RolloutError` becomes a failed episode; everything else propagates. A crash, `sys.exit` or `ConfigError` inside an
agent is such a failure; a token mismatch, a broken store or Ctrl-C stops the run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import Any, Protocol

from rllm.config.sampling import derived_seed
from rllm.engine.event_loop import CANCEL_GRACE_S, UnderWay, rarely_collected, watched_loop
from rllm.engine.failures import failed_episode, is_transient
from rllm.engine.request import RolloutRequest, new_session_id
from rllm.engine.scoring import PendingGroups, Scoring
from rllm.errors import (
    AgentError,
    ConfigError,
    RolloutError,
    RolloutTimeout,
    first_line,
    place_of,
    raised,
    shown,
)
from rllm.telemetry import rollout_span
from rllm.types import Episode

logger = logging.getLogger(__name__)

_OURS = Path(__file__).parents[1]
"""Our package: its frames do not show where an agent waits."""

HTTP_CLIENTS = (
    *("httpx", "httpx2", "httpcore", "httpcore2", "openai", "anthropic", "urllib3", "requests", "niquests"),
    *("aiohttp", "LiteLLM"),
)
"""Loggers that write a line or more for each model call."""


def quiet_http_clients() -> None:
    """Silence the line per request of HTTP clients in a log that shows INFO.

    A program that configures the root logger, as `hydra.main` does, would have hundreds of them per training step. A
    logger with a level of its own keeps it, and a root logger at DEBUG shows everything.
    """
    for name in HTTP_CLIENTS:
        client = logging.getLogger(name)
        if client.level == logging.NOTSET and client.getEffectiveLevel() == logging.INFO:
            client.setLevel(logging.WARNING)


class Rollout(Protocol):
    """Execution of one attempt: the only difference between agents, workflows and plain functions."""

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """Run the attempt and return its episode.

        Raises:
            RolloutError: if it failed; the runner records it as a failed episode.
        """
        ...


class RolloutRunner:
    """Runs attempts and returns one episode for each, in their order.

    At most `max_concurrent` run at a time, over all calls of `run` together.
    """

    def __init__(
        self,
        rollout: Rollout,
        *,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        num_retries: int = 1,
        retry_delay_s: float = 1.0,
        retry_if: Callable[[RolloutError], bool] | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        if not callable(getattr(rollout, "rollout", None)):
            raise ConfigError(
                f"rollout={shown(rollout)}: pass an object with `async def rollout(attempt)`, such as an "
                "AgentExecutionEngine"
            )
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent!r}: use at least 1")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: use a number of seconds above 0")
        if num_retries < 0:
            raise ConfigError(f"num_retries={num_retries!r}: use 0 (never retry) or more")
        self.rollout = rollout
        self.max_concurrent = max_concurrent
        self.timeout_s = timeout_s
        self.num_retries = num_retries
        self.retry_delay_s = retry_delay_s
        self.retry_if = retry_if or is_transient
        self.scoring = scoring or Scoring()
        self._slots = PrioritySemaphore(max_concurrent)
        self._num_runs = 0
        self.under_way = UnderWay()
        """Rollouts that are running now."""

    async def run(
        self,
        attempts: Iterable[RolloutRequest],
        *,
        on_episode: Callable[[Episode], None] | None = None,
        rank: int = 0,
    ) -> list[Episode]:
        """Run every attempt.

        A failed attempt becomes an episode with `info["error"]`. Any other error cancels all attempts of this call and
        propagates, as does cancelling it.

        Args:
            attempts: attempts to run.
            on_episode: called with each episode as it ends, or with a task's episodes together if `scoring` needs them.
            rank: priority among concurrent calls; the lowest goes first.
        """
        quiet_http_clients()
        if self._num_runs == 0:
            self._slots = PrioritySemaphore(self.max_concurrent)  # belongs to the running event loop
        pending = list(attempts)
        episodes: dict[int, Episode] = {}
        queue, groups = iter(enumerate(pending)), PendingGroups(pending, self.scoring)
        # Workers share one queue instead of a task per attempt: 10,000 attempts need only 128 tasks. Half of them wait,
        # so that their rank decides when a slot becomes free.
        workers = min(2 * self.max_concurrent, len(pending))
        fatal: BaseException | None = None
        self._num_runs += 1
        try:
            with watched_loop(), rarely_collected():
                async with self.under_way.watched(), asyncio.TaskGroup() as group:
                    for _ in range(workers):
                        group.create_task(self._work(queue, episodes, groups, on_episode, rank))
        except BaseExceptionGroup as failures:
            fatal = failures.exceptions[0]  # it cancelled the rest
        finally:
            self._num_runs -= 1
        if fatal is not None:
            raise fatal
        if pending:
            self.scoring.warn_of_unknown_parts()
        return [episodes[position] for position in range(len(pending))]

    async def _work(
        self,
        queue: Iterator[tuple[int, RolloutRequest]],
        episodes: dict[int, Episode],
        groups: PendingGroups,
        on_episode: Callable[[Episode], None] | None,
        rank: int,
    ) -> None:
        for position, attempt in queue:
            async with self._slots.slot(rank):
                episodes[position] = episode = await self.episode(attempt)
                for complete in await groups.add(episode):
                    if on_episode is not None:
                        on_episode(complete)

    async def episode(self, attempt: RolloutRequest) -> Episode:
        """Run one attempt with its retries, regardless of `max_concurrent`."""
        for retry in range(self.num_retries + 1):
            started = time.perf_counter()
            if retry:
                sampling, seed = dict(attempt.sampling), attempt.sampling.get("seed")
                if seed is not None:  # so that a retry does not sample the same failure again
                    sampling["seed"] = derived_seed(seed, "retry")
                attempt = replace(attempt, session_id=new_session_id(), trajectories=[], sampling=sampling)
            try:
                with (
                    rollout_span(
                        {
                            "gen_ai.conversation.id": attempt.session_id,
                            "rllm.task_id": attempt.task_id,
                            "rllm.index": attempt.index,
                            "rllm.split": attempt.split,
                            "rllm.training_step": attempt.training_step,
                        }
                    ) as span,
                    self.under_way.one(f"{attempt.task_id}:{attempt.index}"),
                ):
                    episode = await self._within_deadline(attempt)
                    span.note({"rllm.num_trajectories": len(episode.trajectories)})
            except RolloutError as error:
                if retry < self.num_retries and self.retry_if(error):
                    logger.warning("rollout %s:%d: %s; retrying", attempt.task_id, attempt.index, error)
                    await asyncio.sleep(self.retry_delay_s * 2**retry)
                    continue
                episode = failed_episode(attempt, error)
            episode.metrics["timing/rollout_s"] = time.perf_counter() - started
            return episode
        raise AssertionError("unreachable: the last try returns")

    async def _within_deadline(self, attempt: RolloutRequest) -> Episode:
        label = f"rollout {attempt.task_id}:{attempt.index}"
        task = asyncio.create_task(_await(self.rollout, attempt, label), name=label)
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
            if task.done():
                return _result(task, label)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        timeout = RolloutTimeout(
            f"{label} did not finish within timeout_s={self.timeout_s:g}: the traceback shows where it was waiting; "
            "raise rollout.timeout_s (rllm eval: --timeout) if it was merely slow"
        )
        where = _cancellation_error(task, label)
        logger.warning("%s", "\n".join([str(timeout), *_describe_position(where)]))
        raise timeout from where


async def _await(rollout: Rollout, attempt: RolloutRequest, label: str) -> Episode:
    """Run the rollout; errors that would end the program or the run become a failure of this rollout."""
    try:
        return await rollout.rollout(attempt)
    except SystemExit as error:
        raise AgentError(
            f"{label} called sys.exit({error.code!r}){place_of(error)}: return a value, or raise"
        ) from error
    except ConfigError as error:  # raised during the rollout, so it concerns this task only
        raise AgentError(f"{label}: {error}") from error
    except (Exception, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # such as pytest's outcomes, in an agent that runs tests
        raise AgentError(raised(label, error)) from error


def _result(task: asyncio.Task[Episode], label: str) -> Episode:
    try:
        return task.result()
    except asyncio.CancelledError as error:
        # We did not cancel the task, so its own code did; a bare CancelledError would silently end the worker.
        raise AgentError(f"{label} was cancelled from within: a task that the agent awaited was cancelled") from error
    except GeneratorExit as error:  # passed through if the rollout itself is closed, which has no result
        raise AgentError(f"{label} raised GeneratorExit: {first_line(error)}") from error


def _cancellation_error(task: asyncio.Task[Episode], label: str) -> BaseException | None:
    """Return the exception of a cancelled task: its traceback ends at the line where it was waiting."""
    if not task.done():
        logger.error("%s ignores its cancellation and is abandoned:\n%s", label, _stack_of(task))
        return None
    try:
        task.result()
    except BaseException as error:  # the task has ended; this only reads its outcome
        return error
    return None  # it finished during the cancellation


def _describe_position(stopped: BaseException | None) -> list[str]:
    """Return lines that show where a cancelled rollout was: in its abandoned threads, or else in its own code."""
    if stopped is None:
        return []
    frames = traceback.extract_tb(stopped.__traceback__)
    theirs = list(dropwhile(lambda frame: Path(frame.filename).is_relative_to(_OURS), frames))
    lines = ["it was at:\n" + "".join(traceback.format_list(theirs)).rstrip()] if theirs else []
    return getattr(stopped, "__notes__", None) or lines


def _stack_of(task: asyncio.Task[Episode]) -> str:
    """Return the stack of a suspended task, outermost frame first; asyncio itself only returns the first frame."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        lines += traceback.format_stack(frame)[-1:]
        awaited = awaited.cr_await
    return "".join(lines)


class PrioritySemaphore:
    """Semaphore that admits waiters by rank, the lowest first, and then in order of arrival.

    Rollouts of an older training step go before a later step's. Belongs to one event loop.
    """

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def slot(self, rank: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._admission(rank)
        try:
            yield
        finally:
            self._release()

    async def _admission(self, rank: int) -> None:
        admitted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # admitted and cancelled at the same time
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            admitted = heapq.heappop(self._waiting)[-1]
            if not admitted.done():
                admitted.set_result(None)
                return
        self._num_free += 1
