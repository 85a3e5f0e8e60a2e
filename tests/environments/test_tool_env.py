import asyncio
import re
import threading

import pytest

from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import AgentError, ConfigError, EnvError, RewardError
from rllm.tools.tool_base import Tool, ToolCall
from rllm.types import Action

TASK = {"question": "What is 2 + 3?", "ground_truth": "5"}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    return a / b


def exact(task, answer):
    return float(answer == task["ground_truth"])


def call(name: str, call_id: str = "c1", **arguments: object) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def environment(*tools, **settings) -> ToolEnvironment:
    return ToolEnvironment(TASK, tools=tools or [add, divide], reward_fn=exact, **settings)


async def outputs_of(env: ToolEnvironment, *calls: object) -> dict[str, str]:
    observation, reward, done, _ = await env.async_step(Action(list(calls)))
    assert reward is None  # only the answer is scored
    assert done is False
    return observation["tool_outputs"]


async def test_tool_calls_are_executed_and_the_answer_is_scored():
    env = environment()
    assert env.reset() == (TASK, {})
    assert await outputs_of(env, call("add", a=2, b=3)) == {"c1": "5"}
    assert await env.async_step("5") == ({}, 1.0, True, {"truncated": False, "is_correct": None, "reward_metadata": {}})
    with pytest.raises(EnvError, match="reset"):
        await env.async_step("5")


@pytest.mark.parametrize(
    "action",
    [
        {"name": "add", "arguments": {"a": 2, "b": 3}},
        [{"name": "add", "arguments": '{"a": 2, "b": 3}'}],
        [ToolCall("add", {"a": 2, "b": 3})],
        [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
    ],
)
async def test_all_common_formats_of_tool_calls_are_accepted(action: object):
    observation, *_ = await environment().async_step(action)
    assert observation == {"tool_outputs": {"call_0": "5"}}


@pytest.mark.parametrize("arguments", [{"response": "5"}, '{"response": "5"}'])
async def test_finish_is_an_answer(arguments: object):
    finish = {"id": "c2", "function": {"name": "finish", "arguments": arguments}}
    _, reward, done, _ = await environment().async_step([call("add", a=1, b=1), finish])
    assert (reward, done) == (1.0, True)


async def test_last_step_ends_without_an_answer():
    made = []
    env = ToolEnvironment(TASK, [Tool(name="note", function=lambda: made.append(1))], reward_fn=exact, max_steps=2)
    assert await outputs_of(env, call("note")) == {"c1": ""}
    assert await env.async_step([call("note")]) == (
        {},
        0.0,
        True,
        {"truncated": True, "is_correct": None, "reward_metadata": {}},
    )
    assert made == [1]


async def test_parallel_calls_run_concurrently():
    both = threading.Barrier(2, timeout=60)

    def meet(who: str) -> str:
        both.wait()
        return f"{who} was there"

    outputs = await outputs_of(environment(meet), call("meet", "a", who="Ann"), call("meet", "b", who="Bob"))
    assert outputs == {"a": "Ann was there", "b": "Bob was there"}


async def test_error_in_a_tool_is_its_result_and_does_not_affect_siblings():
    env = environment()
    observation, _, done, info = await env.async_step([call("divide", "bad", a=1, b=0), call("add", "good", a=1, b=1)])
    assert observation["tool_outputs"]["bad"] == "Error: tool 'divide' raised ZeroDivisionError: division by zero"
    assert observation["tool_outputs"]["good"] == "2"
    assert info == {"tool_errors": {"bad": "tool 'divide' raised ZeroDivisionError: division by zero"}}
    assert done is False


async def test_hanging_tool_is_cancelled_at_its_deadline(caplog, pass_time):
    async def sleep() -> None:
        await asyncio.Event().wait()

    async def add_in_time(a: int, b: int) -> int:
        added.set()
        return a + b

    added, release = asyncio.Event(), threading.Event()
    env = environment(sleep, Tool(name="block", function=release.wait), add_in_time, tool_timeout_s=60)
    calls = call("sleep", "1"), call("block", "2"), call("add_in_time", "3", a=1, b=1)
    try:
        answering = asyncio.create_task(outputs_of(env, *calls))
        await added.wait()
        pass_time(60)
        outputs = await answering
    finally:
        release.set()
    assert outputs == {
        "1": "Error: tool 'sleep' did not finish within 60 s",
        "2": "Error: tool 'block' did not finish within 60 s",
        "3": "2",
    }
    assert "tool block" in caplog.text  # the name and stack of the abandoned thread are in the log


async def test_long_tool_output_is_truncated():
    flood = Tool(name="flood", function=lambda: "x" * 1_000_000, max_output_chars=100)
    text = (await outputs_of(environment(flood), call("flood")))["c1"]
    assert text == "x" * 100 + "\n[cut: 999900 of 1000000 characters are left out]"


@pytest.mark.parametrize(
    ("bad_call", "message"),
    [
        (call("subtract", a=1), "subtract"),
        (call("add", a=1), "'b'"),
        ({"name": "add", "arguments": "{a: 1}"}, "not JSON"),
        ({"name": "add", "arguments": "[1, 2]"}, "JSON object"),
        ({"function": {"arguments": {}}}, "name"),
        (17, "17"),
    ],
)
async def test_impossible_call_returns_the_reason(bad_call: object, message: str):
    (text,) = (await outputs_of(environment(), bad_call)).values()
    assert text.startswith("Error: ")
    assert re.search(message, text)


async def test_calls_with_the_same_id_are_all_answered():
    outputs = await outputs_of(environment(), call("add", "same", a=1, b=1), call("add", "same", a=2, b=2))
    assert outputs == {"same": "2", "call_1": "4"}


async def test_invalid_unicode_is_replaced_by_a_question_mark():
    def echo(text: str) -> list[str]:
        return [text]

    outputs = await outputs_of(ToolEnvironment(tools=[echo]), {"name": "echo", "arguments": '{"text": "\\ud83d!"}'})
    assert outputs == {"call_0": '["?!"]'}


async def test_generated_call_id_is_unique():
    bare = {"name": "add", "arguments": {"a": 2, "b": 2}}
    first = await outputs_of(environment(), call("add", "call_1", a=1, b=1), bare)
    assert first == {"call_1": "2", "call_2": "4"}
    last = await outputs_of(environment(), bare, call("add", "call_0", a=1, b=1))
    assert last == {"call_1": "4", "call_0": "2"}


@pytest.mark.parametrize("action", [None, 3])
async def test_action_of_another_type_is_an_agent_error(action: object):
    with pytest.raises(AgentError, match=str(action)):
        await environment().async_step(action)


async def test_error_in_a_reward_function_names_it():
    def broken(task, answer):
        raise LookupError("no key")

    with pytest.raises(RewardError, match="broken"):
        await ToolEnvironment(TASK, reward_fn=broken).async_step("5")


async def test_reward_of_none_is_unscored():
    assert (await ToolEnvironment(TASK, reward_fn=lambda task, answer: None).async_step("5"))[1] is None
    assert (await ToolEnvironment(TASK).async_step("5"))[1] is None


async def test_row_with_settings_becomes_an_environment():
    env = ToolEnvironment.from_dict(
        {**TASK, "tools": ["calculator"], "reward_fn": exact, "max_steps": 3, "tool_timeout_s": 5}
    )
    assert (env.task, env.max_steps, env.tool_timeout_s) == (TASK, 3, 5)
    assert await outputs_of(env, call("calculator", expression="2 + 3")) == {"c1": "5"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": [add], "tool_map": {}}, "tool_map"),
        ({"tools": ["no_such_tool"]}, "no_such_tool"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"tool_timeout_s": -1}, "tool_timeout_s=-1"),
        ({"reward_fn": None}, "reward_fn"),
    ],
)
def test_invalid_settings_are_rejected_at_once(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ToolEnvironment.from_dict({**TASK, "reward_fn": exact, **settings})
