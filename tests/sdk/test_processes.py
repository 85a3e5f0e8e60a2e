"""Sessions of calls by other processes, started in any way."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextvars import Context
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.errors import CaptureError, ConfigError
from rllm.sdk import bind, propagation
from rllm.sdk.context import Session, session
from rllm.testing import ScriptedGateway, scripted_gateway
from rllm.types import Episode, Trajectory

from .conftest import ModelServer

sys.path.insert(0, str(Path(__file__).parent))
process_calls: Any = importlib.import_module("process_calls")
sys.path.pop(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", sorted(multiprocessing.get_all_start_methods()))
def test_job_belongs_to_the_session_of_its_submission(server: ModelServer, method: Any) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:

        def ask(text: str) -> None:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            answer = pool.submit(httpx.post, f"{server.base_url}/chat/completions", json=body).result(60)
            assert answer.json()["choices"][0]["message"]["content"] == text

        with propagation.installed():
            with Session({"task": "sum"}, name="first", base_url=server.base_url):
                ask("one")
            with Session(name="second", base_url=server.base_url) as outer, session(agent="judge") as inner:
                ask("two")
        ask("outside")
    assert [item.headers.get("x-rllm-session") for item in server.received] == ["first", "second", None]
    stamps = [json.loads(unquote(item.headers["x-rllm-metadata"])) for item in server.received[:2]]
    assert [(stamp.get("task"), stamp.get("agent")) for stamp in stamps] == [("sum", None), (None, "judge")]
    assert stamps[1]["session_uids"][:2] == [outer._uid, inner._uid], "as for a call in this process"


# Rollouts whose calls are made by other processes


def asked(episode: Episode) -> list[str]:
    return [str(step.chat_completions[0]["content"]) for step in episode.trajectories[0].steps]


async def roll_out(gateway: ScriptedGateway, agent: Callable[[str], Any], *texts: str) -> list[Episode]:
    return await asyncio.gather(*(gateway.rollout_async(agent, {"text": text}) for text in texts))


@pytest.fixture(autouse=True)
def _importable_by_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with scripted_gateway(lambda messages: str(messages[-1]["content"])) as gateway:
        yield gateway


QUICK = {
    *(f"{way} by fork" for way in ("in_process", "in_pool", "in_executor", "in_process_of_thread", "in_grandchild")),
    *("in_process_of_thread by spawn", "in_curl", "in_async_curl", "in_fork", "in_fork raw"),
}
"""One of each kind, since each new interpreter takes a second on a busy machine."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way in QUICK else pytest.mark.slow) for way in process_calls.WAYS],
)
async def test_process_calls_in_the_rollout_that_started_it(gateway: ScriptedGateway, way: str) -> None:
    ask = process_calls.WAYS[way]

    def agent(text: str) -> float:
        answer = ask(text)
        return float((asyncio.run(answer) if inspect.isawaitable(answer) else answer) == text)

    texts = ["one", "two"]
    episodes = await roll_out(gateway, agent, *texts)
    assert [set(asked(episode)) for episode in episodes] == [{text} for text in texts]
    assert {len(asked(episode)) for episode in episodes} == {process_calls.CLIENTS if "in_process by" in way else 1}
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0, 1.0]
    assert not gateway.traces("unattributed")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["pool", pytest.param("executor", marks=pytest.mark.slow)])
async def test_jobs_of_an_older_pool_belong_to_their_rollouts(gateway: ScriptedGateway, kind: str) -> None:
    context = multiprocessing.get_context("forkserver")
    with context.Pool(2) if kind == "pool" else ProcessPoolExecutor(2, mp_context=context) as pool:
        if isinstance(pool, ProcessPoolExecutor):  # which starts its processes when it needs them
            assert list(pool.map(str, range(2))) == ["0", "1"]

        def agent(text: str) -> float:
            texts = [f"{text} {number}" for number in range(3)]
            return float(list(pool.map(process_calls.ask, texts)) == texts)

        episodes = await roll_out(gateway, agent, "one", "two", "three")
    assert [sorted(asked(episode)) for episode in episodes] == [
        [f"{text} {number}" for number in range(3)] for text in ("one", "two", "three")
    ]


class Workers:
    """A process that takes jobs from a queue, started by its first user."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.jobs, self.answers = context.SimpleQueue(), context.SimpleQueue()
        self.process = context.Process(target=process_calls.work, args=(self.jobs, self.answers))

    def start(self) -> None:
        if self.process.pid is None:
            self.process.start()

    def answer(self, function: Callable[[str], str], text: str) -> str:
        self.jobs.put((function, text))
        return str(self.answers.get())


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.jobs.put(None)
    workers.process.join(60)


@pytest.mark.slow
async def test_calls_without_session_are_reported_and_kept(
    gateway: ScriptedGateway, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def begin() -> float:
        process_calls.ask("mine")
        Context().run(workers.start)  # as before the rollouts, but with the gateway in its environment
        return 1.0

    def agent(text: str, bound: bool) -> float:
        return float(workers.answer(bind(process_calls.ask) if bound else process_calls.ask, text) == text)

    await gateway.rollout_async(begin)
    with pytest.raises(CaptureError) as caught:
        await gateway.rollout_async(agent, {"text": "lost", "bound": False})
    (lost,) = gateway.traces("unattributed")
    assert lost.messages[0]["content"] == "lost"
    for fact in ("1 call reached", "'unattributed'", "python-httpx", "rllm.sdk.bind"):
        assert fact in str(caught.value)
    assert "made no model call that reached the gateway" not in str(caught.value)
    with pytest.raises(CaptureError):
        await gateway.rollout_async(agent, {"text": "lost again", "bound": False})
    assert len([line for line in caplog.messages if "without a session" in line]) == 1

    episode = await gateway.rollout_async(agent, {"text": "found", "bound": True})
    assert asked(episode) == ["found"]


@pytest.mark.slow
async def test_process_that_outlives_its_rollout_is_reported(
    gateway: ScriptedGateway, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def agent(text: str) -> float:
        workers.start()
        return float(workers.answer(process_calls.ask, text) == text)

    with AgentFunctionEngine(agent, gateway=gateway._server, store=gateway._store) as engine:
        attempts = [RolloutRequest(task={"text": text}, task_id=text) for text in ("one", "two", "three")]
        first = await engine.rollout(attempts[0])
        assert asked(first) == ["one"]
        for attempt in attempts[1:]:
            with pytest.raises(CaptureError, match=f"pid {workers.process.pid}"):
                await engine.rollout(attempt)
    assert len([line for line in caplog.messages if "still run after their rollout" in line]) == 1


async def test_calls_outside_of_rollouts_need_no_session(gateway: ScriptedGateway) -> None:
    process_calls_url = f"{gateway.url}/v1/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with httpx.AsyncClient() as client:
        before = await client.post(process_calls_url, json=body)
        await gateway.rollout_async(lambda: Trajectory(trainable=False, reward=0.0))
        after = await client.post(process_calls_url, json=body)
    assert before.headers["x-rllm-session"].startswith("s-")
    assert after.headers["x-rllm-session"] == "unattributed"


def test_only_synchronous_functions_can_be_bound() -> None:
    assert bind(process_calls.ask) is process_calls.ask, "nothing to bind outside of a session"
    with pytest.raises(ConfigError, match="async"):
        bind(process_calls.ask_async)
