"""Run many rollouts at once: bounded, retried, timed out, and none of them able to harm another.

The one rule: a `RolloutError` becomes an episode, everything else travels. So a crashed agent is data, as is one that calls
`sys.exit` or finds its task to be wrong; and a token that does not line up, a broken store or Ctrl-C stops the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any, Protocol

from rllm.capture.snapshot import snapshot
from rllm.config.sampling import derived_seed
from rllm.engine.awake import awake
from rllm.engine.checked import has_form
from rllm.engine.garbage import rarely_collected
from rllm.engine.streams import streams_kept
from rllm.engine.turns import Turns
from rllm.engine.under_way import UnderWay
from rllm.engine.watchdog import watched_loop
from rllm.errors import (
    AgentError,
    ConfigError,
    PromptTooLongError,
    RolloutError,
    RolloutTimeout,
    first_line,
    place_of,
    raised,
    shown,
)
from rllm.telemetry import rollout_span
from rllm.types import Episode, Task, TerminationReason, Trajectory

logger = logging.getLogger(__name__)

_OURS = Path(__file__).parents[1]
"""The package, whose lines say nothing about what an agent waits for."""

HTTP_CLIENTS = (
    *("httpx", "httpx2", "httpcore", "httpcore2", "openai", "anthropic", "urllib3", "requests", "niquests"),
    *("aiohttp", "LiteLLM"),
)
"""Loggers of libraries that write a line or more for each call of a model."""

CANCEL_GRACE_S = 5.0
"""How long a cancelled rollout may take to clean up; after that it is left behind, with a warning."""


def quiet_http_clients() -> None:
    """Keep the line for each request of the HTTP clients out of a log that shows INFO.

    A program that configures the root logger, as `hydra.main` does, would have hundreds of them a step. A logger that has
    a level of its own keeps it, and a root logger at DEBUG shows everything.
    """
    for name in HTTP_CLIENTS:
        client = logging.getLogger(name)
        if client.level == logging.NOTSET and client.getEffectiveLevel() == logging.INFO:
            client.setLevel(logging.WARNING)


def new_session_id() -> str:
    """An id that nobody can guess."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try at one task: all that a rollout is told."""

    task: Task
    task_id: str
    """Which rows are the same task; opaque, it may contain anything."""
    index: int = 0
    """Which of the task's attempts this is."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the gateway imposes on every model call of this attempt."""
    trainable: bool = True
    """False for validation: a reward is wanted, tokens need not be usable."""
    split: str = "train"
    training_step: int | None = None
    """For which training step it is made, or after how many of them it evaluates; `None` outside training."""
    run_id: str | None = None
    """Of which training run, since several may share a store; `None` outside training."""
    session_id: str = field(default_factory=new_session_id)
    """Where the model calls are filed; each retry gets a new one, so that no tokens of a failed try are kept."""
    tokens_required: bool = True
    """Whether a trainable step without tokens is an error; not where nobody trains on what comes out."""
    side_calls: bool = False
    """Whether a trajectory that names no calls takes also those that its program made beside the task."""
    trajectories: list[Trajectory] = field(default_factory=list, compare=False, repr=False)
    """What has been done so far, for a rollout to add to as it goes: if it fails, the record keeps these."""

    def own_task(self) -> Task:
        """The task for users' code to do with as it likes: neither the record nor another attempt sees what it changes.

        Raises:
            RolloutError: if its fields hold themselves, or are nested too deeply to be copied.
        """
        try:
            task: Task = snapshot(dict(self.task))
        except RecursionError as error:
            raise RolloutError(
                f"task {self.task_id!r} cannot be copied, because a list or dict in it holds itself or hundreds of others "
                "in each other: make it flatter, or keep it in an object of your own"
            ) from error
        return task


class Rollout(Protocol):
    """How one attempt is made; the only thing in which agents, workflows and plain functions differ."""

    async def rollout(self, attempt: Attempt) -> Episode:
        """Make the attempt.

        Raises:
            RolloutError: if it failed; the runner then records it.
        """
        ...


class RolloutRunner:
    """Turns attempts into episodes, one for each and in their order, with `max_concurrent` under way at a time, over all
    calls of `run` together."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        num_retries: int = 1,
        retry_delay_s: float = 1.0,
        retry_if: Callable[[RolloutError], bool] | None = None,
    ) -> None:
        if not callable(getattr(rollout, "rollout", None)):
            raise ConfigError(
                f"rollout={shown(rollout)}: give an object with `async def rollout(attempt)`, such as an AgentExecutionEngine"
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
        self._turns = Turns(max_concurrent)
        self._num_runs = 0
        self.under_way = UnderWay()
        """The rollouts that are being made now."""

    async def run(
        self,
        attempts: Iterable[Attempt],
        *,
        on_episode: Callable[[Episode], None] | None = None,
        rank: int = 0,
    ) -> list[Episode]:
        """Make every attempt.

        A failed one gives an episode with `info["error"]`. Whatever is not a `RolloutError` cancels all attempts of this
        call and travels, as does cancelling it.

        Args:
            attempts: what to try.
            on_episode: hears of each episode as it ends.
            rank: of several calls at the same time, those of lower rank go first.
        """
        quiet_http_clients()
        if self._num_runs == 0:
            self._turns = Turns(self.max_concurrent)  # of this event loop
        pending = list(attempts)
        episodes: dict[int, Episode] = {}
        queue = iter(enumerate(pending))
        # A few workers that share one queue, not a task for each attempt: 10,000 attempts cost 64 tasks.
        workers = min(self.max_concurrent, len(pending))
        fatal: BaseException | None = None
        self._num_runs += 1
        try:
            with watched_loop(), rarely_collected(), streams_kept():
                async with self.under_way.watched(), asyncio.TaskGroup() as group:
                    for _ in range(workers):
                        group.create_task(self._work(queue, episodes, on_episode, rank))
        except BaseExceptionGroup as failures:
            fatal = failures.exceptions[0]  # it cancelled the rest
        finally:
            self._num_runs -= 1
        if fatal is not None:
            raise fatal
        return [episodes[position] for position in range(len(pending))]

    async def _work(
        self,
        queue: Iterator[tuple[int, Attempt]],
        episodes: dict[int, Episode],
        on_episode: Callable[[Episode], None] | None,
        rank: int,
    ) -> None:
        async with self._turns.one(rank) as turn:
            for position, attempt in queue:
                await turn.give_way()
                episodes[position] = episode = await self.episode(attempt)
                if on_episode is not None:
                    on_episode(episode)

    async def episode(self, attempt: Attempt) -> Episode:
        """Make one attempt, with its retries, whatever else is under way."""
        for retry in range(self.num_retries + 1):
            started = time.perf_counter()
            if retry:
                attempt = replace(
                    attempt, session_id=new_session_id(), trajectories=[], sampling=_reseeded(attempt.sampling)
                )
            try:
                with rollout_span(_facts(attempt)) as span, self.under_way.one(f"{attempt.task_id}:{attempt.index}"):
                    episode = await self._within_deadline(attempt)
                    span.note({"rllm.num_trajectories": len(episode.trajectories)})
            except RolloutError as error:
                if retry < self.num_retries and self.retry_if(error):
                    logger.warning("rollout %s:%d: %s; trying again", attempt.task_id, attempt.index, error)
                    await asyncio.sleep(self.retry_delay_s * 2**retry)
                    continue
                episode = failed_episode(attempt, error)
            episode.metrics["timing/rollout_s"] = time.perf_counter() - started
            return episode
        raise AssertionError("the last try returns")

    async def _within_deadline(self, attempt: Attempt) -> Episode:
        label = f"rollout {attempt.task_id}:{attempt.index}"
        task = asyncio.create_task(_await(self.rollout, attempt, label), name=label)
        try:
            clock = asyncio.get_running_loop().time
            ends_at = clock() - awake.lost_s() + self.timeout_s
            while not task.done() and (left_s := ends_at - clock() + awake.lost_s()) > 0:
                await asyncio.wait({task}, timeout=left_s)
            if task.done():
                return _result(task, label)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        timeout = RolloutTimeout(
            f"{label} did not finish within timeout_s={self.timeout_s:g}: the traceback shows where it was waiting; "
            "raise timeout_s if it was merely slow"
        )
        where = _where_it_was(task, label)
        logger.warning("%s", "\n".join([str(timeout), *_places(where)]))
        raise timeout from where


def _facts(attempt: Attempt) -> dict[str, Any]:
    """What its span tells of an attempt."""
    return {
        "gen_ai.conversation.id": attempt.session_id,
        "rllm.task_id": attempt.task_id,
        "rllm.index": attempt.index,
        "rllm.split": attempt.split,
        "rllm.training_step": attempt.training_step,
    }


def _reseeded(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """For another try: what failed because of what was sampled must not be sampled again."""
    seed = sampling.get("seed")
    return sampling if seed is None else {**sampling, "seed": derived_seed(seed, "retry")}


async def _await(rollout: Rollout, attempt: Attempt, label: str) -> Episode:
    """The rollout, with what would end the program or the run named as the failure of this one."""
    try:
        return await rollout.rollout(attempt)
    except SystemExit as error:
        raise AgentError(
            f"{label} called sys.exit({error.code!r}){place_of(error)}: return a value, or raise"
        ) from error
    except ConfigError as error:  # found while at work, so it is about this task
        raise AgentError(f"{label}: {error}") from error
    except (Exception, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # such as pytest's own, of an agent that tests what it wrote
        raise AgentError(raised(label, error)) from error


def _result(task: asyncio.Task[Episode], label: str) -> Episode:
    try:
        return task.result()
    except asyncio.CancelledError as error:
        # Nobody cancelled the task, so its own code did; passed on as it is, it would silently end the worker.
        raise AgentError(f"{label} was cancelled from within: a task that the agent awaited was cancelled") from error
    except GeneratorExit as error:  # let through where the rollout itself was closed, which has no result
        raise AgentError(f"{label} raised GeneratorExit: {first_line(error)}") from error


def _where_it_was(task: asyncio.Task[Episode], label: str) -> BaseException | None:
    """What the cancelled task raised: its traceback leads to the line that it was waiting at."""
    if not task.done():
        logger.error("%s ignores cancellation and is left behind:\n%s", label, _stack_of(task))
        return None
    try:
        task.result()
    except BaseException as error:  # the task is over; this only reads its outcome
        return error
    return None  # it finished while it was being cancelled


def _places(stopped: BaseException | None) -> list[str]:
    """Where code was that was stopped: the threads that it left behind, else its own lines, from the first that is not ours."""
    if stopped is None:
        return []
    frames = traceback.extract_tb(stopped.__traceback__)
    theirs = list(dropwhile(lambda frame: Path(frame.filename).is_relative_to(_OURS), frames))
    lines = ["it was at:\n" + "".join(traceback.format_list(theirs)).rstrip()] if theirs else []
    return getattr(stopped, "__notes__", None) or lines


def _stack_of(task: asyncio.Task[Episode]) -> str:
    """The lines at which a task waits, outermost first; of a task that is suspended asyncio tells the first only."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        lines += traceback.format_stack(frame)[-1:]
        awaited = awaited.cr_await
    return "".join(lines)


def is_transient(error: RolloutError) -> bool:
    """Whether a new try may succeed: a server failed (5xx, 429) or could not be reached, rather than the agent.

    A timeout is not transient: what was stuck once would double its cost.
    """
    return any(_blames_a_server(item) for item in (error, error.__cause__) if item is not None)


def _blames_a_server(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status == 429
    reason = getattr(error, "reason", None)  # urllib's errors have one
    return (
        isinstance(error, ConnectionError)
        or isinstance(reason, ConnectionError)
        or any(
            f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in _LOST_CONNECTIONS for kind in type(error).__mro__
        )
    )


_LOST_CONNECTIONS = {
    "openai.APIConnectionError",
    "anthropic.APIConnectionError",
    "httpx.NetworkError",
    "httpx.RemoteProtocolError",
    "httpx2.NetworkError",
    "httpx2.RemoteProtocolError",
    "aiohttp.ClientConnectionError",
    "requests.ConnectionError",
}
"""What clients raise that were not answered; by name, because none of them need be installed."""


_REASONS: dict[type[RolloutError], TerminationReason] = {
    RolloutTimeout: TerminationReason.TIMEOUT,
    PromptTooLongError: TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
}


def failed_episode(attempt: Attempt, error: RolloutError) -> Episode:
    """The record of an attempt that gave no episode; it counts as neither right nor wrong."""
    return Episode(
        task=attempt.task,
        task_id=attempt.task_id,
        index=attempt.index,
        session_id=attempt.session_id,
        termination_reason=next(
            (reason for kind, reason in _REASONS.items() if isinstance(error, kind)), TerminationReason.ERROR
        ),
        is_correct=False,
        trajectories=list(filter(has_form, attempt.trajectories)),
        info={
            "error": {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": "".join(traceback.format_exception(error)),
            }
        },
    )
