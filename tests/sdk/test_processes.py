"""Sessions of the calls that other processes make, whichever way these are started."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from rllm.sdk import propagation
from rllm.sdk.context import Session, session
from rllm.testing import ScriptedGateway, scripted_gateway
from rllm.types import Episode

from .conftest import ModelServer

sys.path.insert(0, str(Path(__file__).parent))
process_calls: Any = importlib.import_module("process_calls")
sys.path.pop(0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", sorted(multiprocessing.get_all_start_methods()))
def test_each_job_belongs_to_the_session_that_it_was_submitted_in(server: ModelServer, method: Any) -> None:
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
    assert stamps[1]["session_uids"][:2] == [outer._uid, inner._uid], "as of a call that is made here"


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


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("way", process_calls.WAYS)
async def test_a_process_calls_in_the_rollout_that_started_it(gateway: ScriptedGateway, way: str) -> None:
    ask = process_calls.WAYS[way]

    def agent(text: str) -> float:
        answer = ask(text)
        return float((asyncio.run(answer) if inspect.isawaitable(answer) else answer) == text)

    texts = ["one", "two"]
    episodes = await roll_out(gateway, agent, *texts)
    assert [asked(episode) for episode in episodes] == [[text] for text in texts]
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0, 1.0]
    assert not gateway.traces("unattributed")
