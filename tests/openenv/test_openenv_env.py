"""`openenv:URL` with servers made with the package; `make test-openenv` installs it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rllm.agents.tool_agent import ToolAgent
from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.environments import NamedEnvironment, open_env
from rllm.errors import ConfigError, EnvError
from rllm.testing.scripted import ScriptedEngine
from rllm.types import UNSCORED
from tests.learning.named import openenv
from tests.ports import free_port

pytestmark = pytest.mark.openenv


@contextmanager
def server(kind: str, *, port: int | None = None, sessions: int = 8) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = port or free_port()
    script = Path(__file__).with_name("server.py")
    process = subprocess.Popen([sys.executable, script, kind, str(port), str(sessions)])
    try:
        while True:
            assert process.poll() is None
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def text_url() -> Iterator[str]:
    with server("text") as (url, _):
        yield url


@pytest.fixture(scope="module")
def json_url() -> Iterator[str]:
    with server("json") as (url, _):
        yield url


def test_policy_learns_letters(tmp_path: Path) -> None:
    with server("spell", sessions=64) as (url, _):
        first, *_, last = openenv(url).run(tmp_path / "run")
    assert first < 0.4 < 0.6 < last


def engine_of(named: NamedEnvironment, model) -> AgentExecutionEngine:
    return AgentExecutionEngine(
        agent_class=named.agent_class,
        agent_args=named.agent_args,
        env_class=named.env_class,
        env_args=named.env_args,
        rollout_engine=ScriptedEngine(model),
        max_steps=named.max_steps,
    )


def first_env(named: NamedEnvironment):
    return named.env_class.from_dict({**named.tasks[0], **named.env_args})


async def test_single_field_actions_are_plain_text(text_url: str) -> None:
    named = open_env(f"openenv:{text_url}?size=2&seed=3&goal=12&max_steps=4")
    assert [(row["id"], row["seed"]) for row in named.tasks] == [(f"{text_url}/3", 3), (f"{text_url}/4", 4)]
    assert named.max_steps == 4
    env = first_env(named)
    observation, _ = await env.reset()
    start = int(observation.split()[3])
    assert f"You are at {start} of 12." in observation, "the goal reached the server"
    assert (await env.reset())[0] == observation, "the seed reached the server"
    found = observation.replace(f"at {start}", f"at {start + 2}")
    assert await env.step("  2 ") == (found, 0.0, False, {"num_invalid_actions": 0})
    _, reward, done, info = await env.step("12")
    assert (reward, done, info["state"]["step_count"]) == (1.0, True, 2)
    await env.close()


async def test_other_actions_are_json_with_a_schema_in_the_prompt(json_url: str) -> None:
    env = first_env(open_env(f"openenv:{json_url}?seed=1"))
    observation, _ = await env.reset()
    fields = json.loads(observation.partition("\n\n")[0])
    assert fields["goal"] == 10
    assert '"by"' in observation
    for answer in ("north", "[1]", '{"to": 3}'):
        reply, reward, done, info = await env.step(answer)
        assert (reward, done) == (0.0, False)
        assert reply.startswith("Invalid action: ")
        assert '"by"' in reply
    assert info["num_invalid_actions"] == 3
    observation, _, _, _ = await env.step('So I go: {"by": 1, "times": 2}')
    assert json.loads(observation) == {"position": fields["position"] + 2, "goal": 10}
    await env.close()


async def test_tools_of_the_server_are_called_by_a_tool_agent() -> None:
    def model(messages):
        if messages[-1]["role"] != "tool":
            assert "open_safe" in messages[0]["content"]
            return call("look") + call("open_safe", number=5)
        return call("open_safe", number=int(messages[-2]["content"]))

    def call(name, **arguments):
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    with server("tools") as (url, _):
        named = open_env(f"openenv:{url}?size=2")
        assert named.agent_class is ToolAgent
        opened = await engine_of(named, model).execute_tasks(list(named.tasks))
        gave_up = await engine_of(named, lambda _: "I give up.").execute_tasks(list(named.tasks))
    assert [path.reward for path in opened] == [1.0, 1.0]
    assert [len(path.steps) for path in opened] == [2, 2]
    assert "wrong number" in opened[0].steps[1].chat_completions[-2]["content"]
    assert [(path.reward, len(path.steps)) for path in gave_up] == [(0.0, 1), (0.0, 1)]


async def test_rollouts_wait_for_a_slot_on_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with server("text", sessions=1) as (url, _):
        named = open_env(f"openenv:{url}?size=3")
        paths = await engine_of(named, lambda _: "10").execute_tasks(list(named.tasks))
    assert [path.reward for path in paths] == [1.0, 1.0, 1.0]
    assert caplog.text.count("all sessions are in use") == 1


async def test_unreachable_server_fails_only_its_own_rollouts(text_url: str) -> None:
    with server("text") as (url, process):
        lost = open_env(f"openenv:{url}?size=1")
        well = open_env(f"openenv:{text_url}?size=1")
        both = NamedEnvironment(tasks=lost.tasks, env_class=lost.env_class)
        tasks = [{**named.tasks[0], **named.env_args} for named in (lost, well)]

        def model(messages):
            process.kill()
            process.wait()
            return "10"

        dead, healthy = await engine_of(both, model).execute_tasks(tasks)
        assert healthy.reward == 1.0
        assert dead.reward is UNSCORED
        assert dead.info["error"]["type"] == "EnvError"
        assert url in dead.info["error"]["message"]


async def test_restarted_server_does_not_continue_a_rollout() -> None:
    port = free_port()
    with server("text", port=port) as (url, _):
        env = first_env(open_env(f"openenv:{url}"))
        await env.reset()
    with server("text", port=port):
        await asyncio.sleep(0.1)  # the client reads the end of the connection
        with pytest.raises(EnvError, match="has closed the connection"):
            await env.step("1")
    await env.close()


async def test_error_of_the_environment_is_attributed_to_it(text_url: str) -> None:
    env = first_env(open_env(f"openenv:{text_url}"))
    await env.reset()
    with pytest.raises(EnvError, match=f"{text_url} answered step with an error: fell off"):
        await env.step("fall")
    await env.close()


def test_invalid_input_is_rejected_with_a_message(text_url: str) -> None:
    for spec, message in {
        "openenv:localhost:8000": "is not the URL of a server: use openenv:http://HOST:PORT",
        f"openenv:http://127.0.0.1:{free_port()}": "no OpenEnv server answers at http://127.0.0.1",
        f"openenv:{text_url}/docs": "no OpenEnv server answers",
        f"openenv:{text_url}?goal=-1": "answered reset with an error: goal is below 0",
        f"openenv:{text_url}?seed=-1": "seed=-1: use a whole number",
    }.items():
        with pytest.raises(ConfigError, match=message) as refused:
            open_env(spec)
        assert "\n" not in str(refused.value)
