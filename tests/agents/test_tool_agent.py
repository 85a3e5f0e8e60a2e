import json

import pytest

from rllm.agents.tool_agent import ToolAgent
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import ConfigError
from rllm.types import Action

TASK = {"question": "What is 2 + 3, doubled?", "ground_truth": "10"}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def exact(task, answer):
    return float(answer == task["ground_truth"])


def written(name: str, **arguments: object) -> str:
    """Return a call as Qwen and Hermes models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_tools_are_called_until_the_answer(play):
    env = ToolEnvironment.from_dict({**TASK, "tools": [add], "reward_fn": exact})
    script = [f"<think>first the sum</think>Let me add.\n{written('add', a=2, b=3)}", written("add", a=5, b=5), "10"]
    trajectory = await play(ToolAgent(tools=[add]), env, script)

    first, second, third = trajectory.steps
    assert [call["function"] for call in first.action] == [{"name": "add", "arguments": '{"a": 2, "b": 3}'}]
    assert first.thought == "first the sum"
    assert second.chat_completions[-2] == {"role": "tool", "tool_call_id": first.action[0]["id"], "content": "5"}
    assert third.action == "10"
    assert [step.reward for step in trajectory.steps] == [None, None, 1.0]
    assert trajectory.final_reward() == 1.0
    for earlier, later in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        tokens = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(tokens)] == tokens


async def test_failed_tool_call_is_reported_to_the_model(play):
    env = ToolEnvironment(TASK, [add], reward_fn=exact)
    trajectory = await play(ToolAgent(tools=[add]), env, [written("add", a="two", b=3), written("sub"), "10"])
    errors = [message["content"] for message in trajectory.steps[-1].chat_completions if message["role"] == "tool"]
    assert errors[0].startswith("Error: tool 'add' was called wrongly: argument 'a'")
    assert errors[1] == "Error: there is no tool 'sub'; use one of add"
    assert trajectory.final_reward() == 1.0


def test_tools_are_described_in_the_prompt():
    (message,) = ToolAgent("Use tools.", tools=[add]).chat_completions
    assert message["content"].startswith("Use tools.\n\n")
    assert "Add two numbers." in message["content"]
    assert "<tool_call>" in message["content"]
    assert ToolAgent("Use tools.").chat_completions == [{"role": "system", "content": "Use tools."}]


def test_schemas_can_be_passed_next_to_the_prompt():
    agent = ToolAgent("Use tools.", tools=[add], schemas_in_prompt=False)
    assert agent.chat_completions == [{"role": "system", "content": "Use tools."}]
    assert [schema["function"]["name"] for schema in agent.tool_schemas] == ["add"]
    assert ToolAgent(tools=[add]).tool_schemas is None


def test_parallel_calls_keep_their_order():
    action = ToolAgent(tools=[add]).update_from_model(written("add", a=1, b=1) + written("add", a=2, b=2)).action
    assert [call["function"]["arguments"] for call in action] == ['{"a": 1, "b": 1}', '{"a": 2, "b": 2}']


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 10.", "The answer is 10."),
        (f"<think>{written('add', a=1, b=1)}</think>10", "10"),
        ("<think>never ends", ""),
        ("<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>"),
    ],
)
def test_text_without_a_call_is_the_answer(response: str, answer: str):
    assert ToolAgent(tools=[add]).update_from_model(response) == Action(answer)


@pytest.mark.parametrize("thought", ["", "<think>I write it.</think>", "I write it; the prompt has the tag.</think>"])
def test_thinking_tags_in_arguments_are_content(thought: str):
    agent = ToolAgent(tools=[add], accumulate_thinking=False)
    call = written("write", text="</think> <think> </think> </tool_call>", more="</think>")
    (made,) = agent.update_from_model(thought + call).action
    assert json.loads(made["function"]["arguments"])["text"] == "</think> <think> </think> </tool_call>"
    assert agent.chat_completions[-1]["content"] == call
    assert agent.trajectory.steps[0].thought in thought


def test_tool_call_in_unopened_reasoning_is_ignored():
    response = f"Maybe {written('add', a=1, b=1)}?</think>The tag <think> opens it."
    assert ToolAgent(tools=[add]).update_from_model(response) == Action("The tag <think> opens it.")


def test_parser_is_chosen_by_name():
    text = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    (call,) = ToolAgent(parser_name="llama3_json", tools=[add]).update_from_model(text).action
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}


def test_invalid_settings_are_rejected():
    with pytest.raises(ConfigError, match="tool_parser='klingon' is not known"):
        ToolAgent(parser_name="klingon")
    with pytest.raises(ConfigError, match="not both"):
        ToolAgent(tools=[add], tool_map={})
