"""Rollouts are limited, retried, timed out and isolated; waiters are admitted by rank."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import httpx
import numpy as np
import openai
import pytest
import requests

from rllm.engine import runner as runner_module
from rllm.engine.failures import is_transient
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import PrioritySemaphore, RolloutRunner
from rllm.errors import AgentError, ConfigError, InferenceError, RolloutError, TokenMismatchError
from rllm.types import Episode, TerminationReason

from ..ports import free_port


class Scripted:
    """Source of rollouts that sleep or fail as their task requests."""

    def __init__(self) -> None:
        self.seen: list[RolloutRequest] = []
        self.under_way = self.most_under_way = self.cancelled = 0

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        self.seen.append(attempt)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(attempt.task.get("sleep", 0))
            if attempt.task.get("raise") is not None:
                error = attempt.task["raise"]
                raise error if isinstance(error, BaseException) else error.pop(0)
            return Episode(task_id=attempt.task_id, index=attempt.index)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1


def attempts(*tasks: dict[str, object]) -> list[RolloutRequest]:
    return [RolloutRequest(task=task, task_id=f"task:{number}") for number, task in enumerate(tasks)]


async def test_episodes_are_in_the_order_of_attempts() -> None:
    shuffled = random.Random(0).sample(range(20), 20)
    episodes = await RolloutRunner(Scripted()).run(attempts(*({"sleep": n / 1000} for n in shuffled)))
    assert [episode.task_id for episode in episodes] == [f"task:{number}" for number in range(20)]


async def test_at_most_max_concurrent_rollouts_run() -> None:
    rollout = Scripted()
    await RolloutRunner(rollout, max_concurrent=3).run(attempts(*[{"sleep": 0.001}] * 20))
    assert rollout.most_under_way == 3


async def test_retry_uses_another_seed() -> None:
    rollout = Scripted()
    task = {"raise": [InferenceError("busy", status_code=503) for _ in range(3)]}
    attempt = RolloutRequest(task=task, task_id="t", sampling={"temperature": 1.0, "seed": 7})
    await RolloutRunner(rollout, num_retries=2, retry_delay_s=0).run([attempt])
    assert [seen.sampling["temperature"] for seen in rollout.seen] == [1.0, 1.0, 1.0]
    assert rollout.seen[0].sampling["seed"] == 7
    assert len({seen.sampling["seed"] for seen in rollout.seen}) == 3


async def test_thousands_of_attempts_use_few_asyncio_tasks() -> None:
    most_tasks = 0

    class Counting:
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            nonlocal most_tasks
            await asyncio.sleep(0)
            most_tasks = max(most_tasks, len(asyncio.all_tasks()))
            return Episode(task_id=attempt.task_id)

    episodes = await RolloutRunner(Counting()).run(attempts(*[{}] * 3_000))
    assert len(episodes) == 3_000
    assert most_tasks <= 2 + 3 * 64  # the test, the check for stuck rollouts, and two for each running one


async def test_failure_is_an_episode_and_does_not_affect_siblings(pass_time: Any) -> None:
    def record(episode: Episode) -> None:
        received.append(episode)
        pass_time(60)

    received: list[Episode] = []
    both = attempts({"sleep": 60}, {"raise": AgentError("division by zero")})
    good, bad = await RolloutRunner(Scripted()).run(both, on_episode=record)
    assert not good.failed
    assert bad.failed
    assert bad.termination_reason is TerminationReason.ERROR
    assert (bad.task_id, bad.index) == ("task:1", 0)
    assert bad.info["error"]["type"] == "AgentError"
    assert bad.info["error"]["message"] == "division by zero"
    assert "in rollout" in bad.info["error"]["traceback"]
    assert received == [bad, good]


async def test_only_server_failures_are_retried_in_a_new_session() -> None:
    rollout = Scripted()
    down = InferenceError("upstream is down", status_code=503)
    (episode,) = await RolloutRunner(rollout, retry_delay_s=0).run(
        attempts({"raise": [down, InferenceError("again", status_code=502)]})
    )
    assert episode.info["error"]["message"] == "again"
    assert len({attempt.session_id for attempt in rollout.seen}) == 2
    assert episode.session_id == rollout.seen[-1].session_id

    rollout = Scripted()
    await RolloutRunner(rollout, num_retries=3).run(attempts({"raise": AgentError("bug")}))
    assert len(rollout.seen) == 1


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (InferenceError("x", status_code=500), True),
        (InferenceError("x", status_code=429), True),
        (InferenceError("x", status_code=400), False),
        (AgentError("x"), False),
    ],
)
def test_transient_errors_are_recognized(error: InferenceError, transient: bool) -> None:
    assert is_transient(error) is transient


async def ask_with_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        await session.get(url)


@pytest.mark.parametrize(
    "ask",
    [
        urllib.request.urlopen,
        httpx.get,
        requests.get,
        lambda url: asyncio.run(ask_with_aiohttp(url)),
        lambda url: openai.OpenAI(base_url=url, api_key="-", max_retries=0).models.list(),
        lambda url: anthropic.Anthropic(base_url=url, api_key="-", max_retries=0).models.list(),
    ],
)
def test_agent_error_caused_by_a_lost_connection_is_transient(ask: Callable[[str], Any]) -> None:
    with pytest.raises(Exception) as lost:  # noqa: PT011 - every client raises its own
        ask(f"http://127.0.0.1:{free_port()}")
    error = AgentError("agent raised")
    error.__cause__ = lost.value
    assert is_transient(error)


async def test_stuck_rollout_is_cancelled_at_its_deadline_with_its_stack() -> None:
    async def wait_without_end() -> None:
        await asyncio.Event().wait()

    class Stuck:
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            await wait_without_end()
            raise AssertionError

    (episode,) = await RolloutRunner(Stuck(), timeout_s=0.05).run(attempts({}))
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert "timeout_s=0.05" in episode.info["error"]["message"]
    assert "task:0:0" in episode.info["error"]["message"]
    assert "in wait_without_end" in episode.info["error"]["traceback"]


async def test_rollout_that_ignores_cancellation_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "CANCEL_GRACE_S", 0.05)
    release = asyncio.Event()

    class Stubborn:
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            while not release.is_set():
                try:
                    await self.ignore_cancellation()
                except asyncio.CancelledError:
                    continue
            return Episode()

        async def ignore_cancellation(self) -> None:
            await release.wait()

    with caplog.at_level(logging.ERROR):
        (episode,) = await RolloutRunner(Stubborn(), timeout_s=0.05).run(attempts({}))
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert "ignores its cancellation" in caplog.text
    assert "in ignore_cancellation" in caplog.text
    release.set()


async def test_rollout_that_cancels_itself_is_a_failed_episode() -> None:
    rollout = Scripted()
    first, second = await RolloutRunner(rollout, max_concurrent=1).run(
        attempts({"raise": asyncio.CancelledError()}, {})
    )
    assert "cancelled from within" in first.info["error"]["message"]
    assert not second.failed


async def test_token_mismatch_is_raised_and_cancels_the_rest() -> None:
    rollout = Scripted()
    cause = ValueError("the reason")
    error = TokenMismatchError("3 ids, 2 logprobs")
    error.__cause__ = cause
    with pytest.raises(TokenMismatchError, match="3 ids") as raised:
        await RolloutRunner(rollout).run(attempts({"sleep": 300}, {"raise": error}, {"sleep": 300}))
    assert raised.value.__cause__ is cause
    assert rollout.cancelled == 2


async def test_cancelling_the_run_cancels_every_rollout() -> None:
    rollout = Scripted()
    run = asyncio.create_task(RolloutRunner(rollout, max_concurrent=4).run(attempts(*[{"sleep": 300}] * 9)))
    while len(rollout.seen) < 4:  # noqa: ASYNC110  # one turn of the loop starts the workers, another their rollouts
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (rollout.cancelled, rollout.under_way, len(rollout.seen)) == (4, 0, 4)


def test_invalid_rollout_source_is_rejected() -> None:
    with pytest.raises(ConfigError, match="rollout=<function"):
        RolloutRunner(lambda attempt: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("root", "own", "expected"),
    [
        (logging.INFO, logging.NOTSET, logging.WARNING),
        (logging.INFO, logging.INFO, logging.INFO),
        (logging.DEBUG, logging.NOTSET, logging.DEBUG),
        (logging.WARNING, logging.NOTSET, logging.WARNING),
    ],
)
async def test_http_clients_do_not_log_each_request(root: int, own: int, expected: int) -> None:
    loggers = [logging.getLogger(name) for name in ("", *runner_module.HTTP_CLIENTS)]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(own)
        loggers[0].setLevel(root)
        await RolloutRunner(Scripted()).run(attempts({}))
        assert {logger.getEffectiveLevel() for logger in loggers[1:]} == {expected}
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


async def test_empty_attempts_give_no_episodes() -> None:
    assert await RolloutRunner(Scripted()).run([]) == []


@pytest.mark.parametrize("setting", [{"max_concurrent": 0}, {"timeout_s": 0.0}, {"num_retries": -1}])
def test_invalid_settings_are_reported(setting: dict[str, float]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        RolloutRunner(Scripted(), **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "expected_message"),
    [
        (
            SystemExit(3),
            r"rollout task:0:0 called sys.exit\(3\) \(at .*test_runner.py:[0-9]+\): return a value, or raise",
        ),
        (ConfigError("map='?': draw one"), r"rollout task:0:0: map='\?': draw one"),
        (GeneratorExit("over"), "rollout task:0:0 raised GeneratorExit: over"),
        (pytest.fail.Exception("2 tests failed"), "rollout task:0:0 raised Failed: 2 tests failed"),
    ],
)
async def test_system_exit_in_a_rollout_ends_only_that_rollout(error: BaseException, expected_message: str) -> None:
    bad, good = await RolloutRunner(Scripted()).run(attempts({"raise": error}, {"sleep": 0.01}))
    assert not good.failed
    assert bad.info["error"]["type"] == "AgentError"
    with pytest.raises(AssertionError, match=expected_message):
        raise AssertionError(bad.info["error"]["message"])


async def test_changes_to_a_task_stay_within_its_attempt() -> None:
    shared = object()
    attempt = RolloutRequest(task={"list": [{"a": 1}], "object": shared}, task_id="x")
    own = attempt.own_task()
    own["list"][0]["a"] = 2
    own["more"] = True
    assert attempt.task == {"list": [{"a": 1}], "object": shared}
    assert own["object"] is shared


def test_sets_tuples_and_arrays_of_a_task_are_copied() -> None:
    attempt = RolloutRequest(
        task={"set": {1}, "tuple": ([1],), "bytes": bytearray(b"1"), "map": np.ones(2)}, task_id="x"
    )
    own = attempt.own_task()
    own["set"].add(2)
    own["tuple"][0].append(2)
    own["bytes"].append(2)
    own["map"][0] = 2
    assert (attempt.task["set"], attempt.task["tuple"], attempt.task["bytes"]) == ({1}, ([1],), b"1")
    assert attempt.task["map"].tolist() == [1.0, 1.0]


def test_task_that_cannot_be_copied_fails_its_rollout() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    gc.collect()  # no finalizer of another test's objects runs at the limit of the recursion
    with pytest.raises(RolloutError, match="'x'"):
        RolloutRequest(task={"circle": circle}, task_id="x").own_task()


async def test_lowest_rank_enters_first_then_first_come_first_served() -> None:
    turns, entered = PrioritySemaphore(1), []

    async def enter(rank: int, name: str) -> None:
        async with turns.slot(rank):
            entered.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for rank, name in ((5, "a"), (2, "b"), (1, "c"), (2, "d"), (1, "e")):
            group.create_task(enter(rank, name))
    assert entered == ["a", "c", "e", "b", "d"], "a found the slot free"


async def test_slot_of_a_cancelled_waiter_is_passed_on() -> None:
    turns = PrioritySemaphore(1)

    async def enter() -> None:
        async with turns.slot(0):
            await asyncio.sleep(0)

    first = asyncio.create_task(enter())
    await asyncio.sleep(0)
    for num_turns in range(4):  # cancel a waiter: before, during and after its turn
        waiting, behind = asyncio.create_task(enter()), asyncio.create_task(enter())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(first, waiting, behind, return_exceptions=True)
            async with turns.slot(0):
                pass
        first = asyncio.create_task(enter())
        await asyncio.sleep(0)
    await first


async def test_concurrent_runs_share_the_limit_and_lower_ranks_go_first() -> None:
    live, most, began = 0, 0, []

    class Counting:
        async def rollout(self, attempt: RolloutRequest) -> Episode:
            nonlocal live, most
            began.append(attempt.task_id)
            live += 1
            most = max(most, live)
            await asyncio.sleep(0)
            live -= 1
            return Episode(task_id=attempt.task_id)

    runner = RolloutRunner(Counting(), max_concurrent=3)
    later = asyncio.create_task(runner.run([RolloutRequest(task={}, task_id="later")] * 9, rank=7))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await runner.run([RolloutRequest(task={}, task_id="earlier")] * 6, rank=3)
    await later
    assert most == 3
    assert began == ["later"] * 3 + ["earlier"] * 6 + ["later"] * 6
