"""Agents that are programs: real processes under the function engine, each with its own session."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.errors import RLLMError
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.sdk import environment, run_program, run_program_async, session
from rllm.sdk.variables import OPERATORS_KEYS
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine
from rllm.types import Episode

ASK = """
import json, os, sys, urllib.request

def ask(text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

for text in sys.argv[1:]:
    print(ask(text), flush=True)
"""
"""The smallest program that calls a model: it starts quickly, and knows the gateway by its path alone."""

OPENAI = "import openai; print(openai.OpenAI().responses.create(model='m', input='hello').output_text)"
ANTHROPIC = """
import anthropic
message = [{"role": "user", "content": "hello"}]
print(anthropic.Anthropic().messages.create(model='m', max_tokens=64, messages=message).content[0].text)
"""


@pytest.fixture
def store() -> MemoryTraceStore:
    return MemoryTraceStore()


@pytest.fixture
def gateway(store: MemoryTraceStore) -> Iterator[GatewayServer]:
    scripted = ScriptedEngine(lambda messages: str(messages[-1]["content"]).upper())
    with GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        yield gateway


@pytest.fixture
def roll_out(gateway: GatewayServer, store: MemoryTraceStore) -> Callable[..., Any]:
    async def roll_out(function: Callable[..., Any], *tasks: dict[str, Any], **settings: Any) -> list[Episode]:
        attempts = [RolloutRequest(task=task, task_id=str(number)) for number, task in enumerate(tasks)]
        with AgentFunctionEngine(function, gateway=gateway, store=store) as engine:
            return await RolloutRunner(engine, num_retries=0, **settings).run(attempts)

    return roll_out


def asking(*texts: str) -> list[str]:
    return [sys.executable, "-S", "-c", ASK, *texts]


def asked(episode: Episode) -> list[str]:
    return [str(step.chat_completions[0]["content"]) for step in episode.trajectories[0].steps]


@pytest.mark.slow
async def test_concurrent_programs_have_their_own_calls(roll_out: Any) -> None:
    async def agent(number: int) -> float:
        done = await run_program_async(asking(f"{number} first", f"{number} second"))
        return float(done.stdout == f"{number} FIRST\n{number} SECOND\n")

    episodes = await roll_out(agent, *({"number": number} for number in range(6)))
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0] * 6
    for number, episode in enumerate(episodes):
        assert asked(episode) == [f"{number} first", f"{number} second"]
        assert all(step.response_ids for step in episode.trajectories[0].steps)


@pytest.mark.parametrize(
    "program",
    [pytest.param(OPENAI, id="openai"), pytest.param(ANTHROPIC, id="anthropic", marks=pytest.mark.slow)],
)
async def test_programs_with_ordinary_clients_need_no_changes(roll_out: Any, program: str) -> None:
    def agent() -> float:
        return float(run_program([sys.executable, "-c", program]).stdout == "HELLO\n")

    (episode,) = await roll_out(agent, {})
    assert episode.trajectories[0].reward == 1.0, episode.info
    assert len(episode.trajectories[0].steps) == 1


async def test_program_without_calls_gets_an_error_with_the_remedy(roll_out: Any, tmp_path: Path) -> None:
    codex = tmp_path / "codex"
    codex.write_text("#!/bin/sh\necho I have my own ideas\n")
    codex.chmod(0o755)

    def agent() -> float:
        run_program([codex])
        return 1.0

    def agent_with_timeout() -> float:
        return float(run_program([codex]).stdout)

    for function in (agent, agent_with_timeout):
        (episode,) = await roll_out(function, {})
        error = episode.info["error"]
        assert error["type"] == "CaptureError"
        assert f"nor did {codex}, which it started" in error["message"]
        assert "CODEX_HOME" in error["message"]
    assert "raised ValueError: could not convert string to float" in error["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("is_async", [False, True])
async def test_program_is_stopped_with_its_rollout(roll_out: Any, tmp_path: Path, is_async: bool) -> None:
    command = ["/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 600"]

    def agent() -> None:
        with session(role="runs on when the rollout has ended"):
            run_program(command)

    async def async_agent() -> None:
        await run_program_async(command)

    (episode,) = await roll_out(async_agent if is_async else agent, {}, timeout_s=1.0)
    assert episode.info["error"]["type"] == "RolloutTimeout"
    deadline = time.monotonic() + 60
    while (tmp_path / "pid").exists() and is_running(int((tmp_path / "pid").read_text() or 0)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    return bool(pid) and Path(f"/proc/{pid}").exists()


async def in_asyncio(command: list[str]) -> bytes:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    return (await process.communicate())[0]


def in_a_shell(command: list[str]) -> bytes:
    return subprocess.check_output(shlex.join(command), shell=True)


def with_a_variable(command: list[str]) -> bytes:
    return subprocess.check_output(command, env={**os.environ, "MINE": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("start", [subprocess.check_output, with_a_variable, in_a_shell, in_asyncio])
async def test_programs_started_in_any_way_belong_to_their_rollouts(roll_out: Any, start: Any) -> None:
    async def agent(number: int) -> float:
        printed = start(asking(str(number)))
        return float(await printed if asyncio.iscoroutine(printed) else printed)

    episodes = await roll_out(agent, *({"number": number} for number in range(2)))
    for number, episode in enumerate(episodes):
        assert episode.trajectories[0].reward == number, episode.info
        assert asked(episode) == [str(number)]


async def test_explicit_environment_of_a_program_is_not_changed(roll_out: Any) -> None:
    def agent() -> float:
        run_program(asking("x"))
        return float(subprocess.check_output(["/usr/bin/env"], env={"A": "1"}, text=True) == "A=1\n")

    (episode,) = await roll_out(agent, {})
    assert episode.trajectories[0].reward == 1.0


async def test_side_calls_of_a_program_are_left_out_if_its_client_names_the_session(
    roll_out: Any,
) -> None:
    code = ASK.replace('"application/json"}', '"application/json", **header}').replace(
        '"messages"', '**tools(text), "messages"'
    )
    code = f"""{code.partition("for text")[0]}
header = dict([os.environ["OPENAI_CUSTOM_HEADERS"].split(": ", 1)])
tool = {{"type": "function", "function": {{"name": "f", "parameters": {{}}}}}}
tools = lambda text: {{"tools": [tool]}} if text == "task" else {{}}
ask("title")
ask("task")
"""

    def agent() -> None:
        run_program([sys.executable, "-S", "-c", code])

    (episode,) = await roll_out(agent, {})
    assert asked(episode) == ["task"]
    assert episode.trajectories[0].info["num_side_calls"] == 1


async def test_variables_set_by_the_agent_override_ours(roll_out: Any) -> None:
    def agent() -> float:
        run_program(asking("x"))
        done = run_program(["/bin/sh", "-c", "echo $OPENAI_API_KEY $MINE"], env={"OPENAI_API_KEY": "own", "MINE": "1"})
        return float(done.stdout == "own 1\n")

    (episode,) = await roll_out(agent, {})
    assert episode.trajectories[0].reward == 1.0


def supervised(command: list[str]) -> bytes:
    return run_program(command).stdout.encode()


def with_explicit_session(command: list[str]) -> bytes:
    return subprocess.check_output(command, env={**os.environ, **environment()})


async def test_operator_keys_are_not_passed_to_programs(roll_out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPERATORS_KEYS:
        monkeypatch.setenv(name, f"secret {name}")

    async def agent() -> float:
        run_program(asking("x"))
        kept = True
        for start in (
            supervised,
            subprocess.check_output,
            with_a_variable,
            with_explicit_session,
            in_a_shell,
            in_asyncio,
        ):
            printed: Any = start(["/usr/bin/env"])
            kept &= b"secret" not in (await printed if asyncio.iscoroutine(printed) else printed)
        return float(kept)

    (episode,) = await roll_out(agent, {})
    assert episode.trajectories[0].reward == 1.0


async def test_key_can_be_passed_to_a_program_explicitly(roll_out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_UPSTREAM_API_KEY", "theirs")

    def agent() -> float:
        run_program(asking("x"))
        done = run_program(["/usr/bin/env"], env={"RLLM_UPSTREAM_API_KEY": "theirs"})
        return float("RLLM_UPSTREAM_API_KEY=theirs\n" in done.stdout)

    (episode,) = await roll_out(agent, {})
    assert episode.trajectories[0].reward == 1.0


def test_program_outside_of_a_rollout_gets_the_unchanged_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://mine/v1")
    with session():
        done = run_program(["/bin/sh", "-c", "echo $OPENAI_BASE_URL"])
    assert done.stdout == "http://mine/v1\n"
    assert os.environ["OPENAI_BASE_URL"] == "http://mine/v1"


async def test_abandoned_thread_cannot_start_programs(roll_out: Any, tmp_path: Path) -> None:
    is_left, ended = threading.Event(), threading.Event()
    raised: list[str] = []

    def agent() -> None:
        assert is_left.wait(60)
        try:
            run_program(["/usr/bin/touch", str(tmp_path / "late")])
        except RLLMError as error:
            raised.append(str(error))
        ended.set()

    (episode,) = await roll_out(agent, {}, timeout_s=0.05)
    is_left.set()
    assert ended.wait(60)
    assert episode.failed
    assert not (tmp_path / "late").exists()
    assert "'/usr/bin/touch' cannot be started: the rollout" in raised[0]
