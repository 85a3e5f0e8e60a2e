"""`mcp:COMMAND?tasks=FILE`, with a real server."""

import json
import pickle
import shlex
import sys
from pathlib import Path

import pytest

from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.environments import open_env
from rllm.errors import ConfigError
from rllm.testing.scripted import ScriptedEngine

SERVER = shlex.join([sys.executable, str(Path(__file__).parents[1] / "tools" / "mcp_server_script.py")])
ROWS = [{"question": "What is 2 + 3?", "answer": "5"}, {"question": "What is 2 + 4?", "answer": "7"}]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    file = written(tmp_path_factory.mktemp("tasks"), ROWS)
    named = open_env(f"mcp:{SERVER}?tasks={file}&max_steps=3")
    yield named
    named.env_args["tools"][0]._connection.close()


def written(folder, rows):
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def adding(messages):
    """Call the tool with the numbers of the question, and repeat its result."""
    if messages[-1]["role"] == "tool":
        return f"Answer: {messages[-1]['content']}"
    first, second = (int(word.strip("?")) for word in messages[-1]["content"].split() if word.strip("?").isdigit())
    call = {"name": "add", "arguments": {"a": first, "b": second}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def rollouts(named, model):
    engine = AgentExecutionEngine(
        agent_class=named.agent_class,
        agent_args=named.agent_args,
        env_class=named.env_class,
        env_args=named.env_args,
        rollout_engine=ScriptedEngine(model),
        max_steps=named.max_steps,
    )
    return await engine.execute_tasks(list(named.tasks))


async def test_answers_found_with_server_tools_are_compared_with_the_file(named):
    paths = await rollouts(named, adding)
    assert [path.reward for path in paths] == [1.0, 0.0]
    assert [len(path.steps) for path in paths] == [2, 2]


@pytest.mark.slow
async def test_server_that_exits_during_a_rollout_is_reported_and_restarted(named):
    def model(messages):
        if messages[-1]["role"] == "user" and "2 + 4" in messages[-1]["content"]:
            return '<tool_call>\n{"name": "die", "arguments": {}}\n</tool_call>'
        return "5" if messages[-1]["role"] == "tool" else adding(messages)

    healthy, died = await rollouts(named, model)
    assert healthy.reward == 1.0
    found = died.steps[-1].chat_completions[-2]["content"]
    assert "tool 'die': the server ended during the call" in found
    assert [path.reward for path in await rollouts(named, adding)] == [1.0, 0.0]


def test_each_process_opens_its_own_connection(named):
    tools = named.env_args["tools"]
    sent = pickle.loads(pickle.dumps(tools))
    assert [tool.json for tool in sent] == [tool.json for tool in tools]
    assert sent[0]._connection is tools[0]._connection, "within a process the connection is shared"


@pytest.mark.parametrize(
    ("rows", "query", "message"),
    [
        (ROWS, "", "tasks is missing"),
        ([{"text": "?"}], "tasks={file}", "row 0 of .* has no question"),
        ([ROWS[0], {"question": "?"}], "tasks={file}", "row 1 of .* has no answer"),
        (ROWS, "tasks={file}&rewards=a:b", "did you mean 'reward'"),
        (ROWS, "tasks={file}&reward=nowhere:score", "no module 'nowhere'"),
        (ROWS, "tasks={file}", "'no-such-program' cannot be started"),
    ],
)
def test_invalid_input_is_rejected_before_a_rollout(tmp_path, rows, query, message):
    spec = f"mcp:no-such-program?{query.format(file=written(tmp_path, rows))}".rstrip("?")
    with pytest.raises(ConfigError, match=message):
        open_env(spec)
