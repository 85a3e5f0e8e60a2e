"""LangChain and LangGraph with our clients: each model call is recorded in its rollout, in any executor."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableParallel
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.sdk import TrajectoryView, get_chat_client, get_chat_client_async, session, trajectory
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import Answer, ScriptedEngine, decode
from rllm.types import Episode, Trajectory

from .conftest import ModelServer

PROXY = "http://localhost:4000/v1"
NUM_ROLLOUTS = 4
SCHEMA = {
    "title": "Reply",
    "type": "object",
    "properties": {"reply": {"type": "string"}},
    "required": ["reply"],
    "additionalProperties": False,
}
RollOut = Callable[[Callable[..., Any]], Awaitable[list[Episode]]]


def scripted_model(messages: list[dict[str, Any]]) -> Answer:
    """Repeat the last message in brackets, call a tool twice for "look up X", and follow a schema for "reply X"."""
    match str(messages[-1]["content"]).split():
        case ["look", "up", word]:
            return {"tool_calls": [{"name": "look_up", "arguments": {"word": f"{word}-{n}"}} for n in (1, 2)]}
        case ["call", word]:
            return {"tool_calls": [{"name": "Reply", "arguments": {"reply": word}}]}
        case ["json", word]:
            return f'{{"reply": "{word}"}}'
        case words:
            return f"[{' '.join(words)}]"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def chat() -> AsyncIterator[ChatOpenAI]:
    """LangChain's model with our clients, as published: no key, and a URL without a server."""
    with get_chat_client(base_url=PROXY) as client:
        async with get_chat_client_async(base_url=PROXY) as async_client:
            yield ChatOpenAI(
                model="policy",
                client=client,
                async_client=async_client,
                root_client=client,  # LangChain calls this one for answers that follow a JSON schema
                root_async_client=async_client,
                temperature=1.0,
                max_tokens=200,
            )


@pytest.fixture
def roll_out() -> RollOut:
    """`await roll_out(agent)`: concurrent episodes of `agent(word=...)` for the words w0, w1, ..."""

    async def run(agent: Callable[..., Any]) -> list[Episode]:
        store = MemoryTraceStore()
        upstream = EngineUpstream(ScriptedEngine(scripted_model), "policy")
        attempts = [RolloutRequest(task={"word": f"w{n}"}, task_id="t", index=n) for n in range(NUM_ROLLOUTS)]
        with (
            GatewayServer(store, upstream) as gateway,
            AgentFunctionEngine(agent, gateway=gateway, store=store) as engine,
        ):
            episodes = await RolloutRunner(engine, retry_delay_s=0).run(attempts)
        assert not [episode.info for episode in episodes if episode.failed]
        return episodes

    return run


def path_of(episode: Episode) -> Trajectory:
    (path,) = episode.trajectories
    return path


def texts_of(path: TrajectoryView) -> list[str]:
    """Return the text of the sampled tokens, call by call."""
    return [decode(step.response_ids) for step in path.steps]


def look_up_with(chat: ChatOpenAI) -> BaseTool:
    """Return a blocking tool, which LangGraph runs in a thread, and which calls the model itself."""

    @tool
    def look_up(word: str) -> str:
        """Look up a word."""
        return chat.invoke(f"about {word}").text

    return look_up


def graph_of(chat: ChatOpenAI, look_up: BaseTool | None = None) -> Any:
    """Think, use tools, think again; blocking nodes, which LangGraph runs in threads."""
    look_up = look_up or look_up_with(chat)
    bound = chat.bind_tools([look_up])

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    return (
        StateGraph(MessagesState)
        .add_node("think", think)
        .add_node("tools", ToolNode([look_up]))
        .add_edge(START, "think")
        .add_conditional_edges("think", tools_condition)
        .add_edge("tools", "think")
        .compile()
    )


# Every way to call the model


def test_threads_sharing_a_new_client_all_find_create() -> None:
    with get_chat_client(base_url=PROXY) as client:
        bare = openai.OpenAI.with_raw_response.__get__(client)  # another thread may have found that of the parent class
        assert client.with_raw_response is bare
        assert client.with_raw_response.create


async def _invoke(chat: ChatOpenAI, word: str) -> None:
    assert (await asyncio.to_thread(chat.invoke, word)).text == f"[{word}]"


async def _ainvoke(chat: ChatOpenAI, word: str) -> None:
    assert (await chat.ainvoke(word)).text == f"[{word}]"


async def _stream(chat: ChatOpenAI, word: str) -> None:
    chunks = await asyncio.to_thread(lambda: list(chat.stream(f"a long answer to {word}")))
    assert "".join(chunk.text for chunk in chunks) == f"[a long answer to {word}]"


async def _astream(chat: ChatOpenAI, word: str) -> None:
    chunks = [chunk.text async for chunk in chat.astream(f"a long answer to {word}")]
    assert len(chunks) > 3
    assert "".join(chunks) == f"[a long answer to {word}]"


async def _batch(chat: ChatOpenAI, word: str) -> None:
    await asyncio.to_thread(chat.batch, [f"{word} {n}" for n in range(5)])


async def _abatch(chat: ChatOpenAI, word: str) -> None:
    await chat.abatch([f"{word} {n}" for n in range(5)])


async def _parallel(chat: ChatOpenAI, word: str) -> None:
    await asyncio.to_thread(RunnableParallel(one=chat, other=chat).invoke, word)
    await RunnableParallel(one=chat, other=chat).ainvoke(word)


async def _function_calling(chat: ChatOpenAI, word: str) -> None:
    structured = chat.with_structured_output(SCHEMA, method="function_calling")
    assert await structured.ainvoke(f"call {word}") == {"reply": word}


async def _json_schema(chat: ChatOpenAI, word: str) -> None:
    structured = chat.with_structured_output(SCHEMA, method="json_schema")
    assert await structured.ainvoke(f"json {word}") == {"reply": word}
    assert await asyncio.to_thread(structured.invoke, f"json {word}") == {"reply": word}
    assert [part async for part in structured.astream(f"json {word}")][-1] == {"reply": word}


@pytest.mark.parametrize(
    ("call", "num_calls"),
    [
        (_invoke, 1),
        (_ainvoke, 1),
        (_stream, 1),
        (_astream, 1),
        (_batch, 5),
        (_abatch, 5),
        (_parallel, 4),
        (_function_calling, 1),
        (_json_schema, 3),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
async def test_calls_are_captured_in_their_own_rollout(
    chat: ChatOpenAI, roll_out: RollOut, call: Callable[[ChatOpenAI, str], Awaitable[None]], num_calls: int
) -> None:
    async def agent(word: str) -> float:
        await call(chat, word)
        return 1.0

    for episode in await roll_out(agent):
        texts = texts_of(path_of(episode))
        assert len(texts) == num_calls
        assert all(f"w{episode.index}" in text for text in texts)


async def test_tool_calls_survive_capture(chat: ChatOpenAI, roll_out: RollOut) -> None:
    async def agent(word: str) -> float:
        asked = HumanMessage(f"look up {word}")
        called = await bound.ainvoke([asked])
        answers = [await look_up.ainvoke(call) for call in called.tool_calls]
        await bound.ainvoke([asked, called, *answers])
        return 1.0

    look_up = look_up_with(chat)
    bound = chat.bind_tools([look_up])
    for episode in await roll_out(agent):
        first, *_, last = path_of(episode).steps
        word = f"w{episode.index}"
        assert (first.finish_reason, last.finish_reason) == ("tool_calls", "stop")
        user, called, *answers, final = last.chat_completions
        assert first.chat_completions == [user, called]
        assert [call["function"]["arguments"] for call in called["tool_calls"]] == [
            f'{{"word": "{word}-1"}}',
            f'{{"word": "{word}-2"}}',
        ]
        assert [(message["role"], message["content"]) for message in answers] == [
            ("tool", f"[about {word}-1]"),
            ("tool", f"[about {word}-2]"),
        ]
        assert [message["tool_call_id"] for message in answers] == [call["id"] for call in called["tool_calls"]]
        assert final["content"] == f"[[about {word}-2]]"
        together = [*first.prompt_ids, *first.response_ids]
        assert last.prompt_ids[: len(together)] == together, "the second turn continues the tokens of the first"


# Graphs


async def _graph_astream(graph: Any, state: dict[str, Any]) -> None:
    async for _ in graph.astream(state):
        pass


async def _graph_ainvoke(graph: Any, state: dict[str, Any]) -> None:
    await graph.ainvoke(state)


async def _graph_in_a_thread(graph: Any, state: dict[str, Any]) -> None:
    await asyncio.to_thread(graph.invoke, state)


@pytest.mark.parametrize("run", [_graph_astream, _graph_ainvoke, _graph_in_a_thread])
async def test_calls_of_nodes_and_tool_threads_keep_their_order(
    chat: ChatOpenAI, roll_out: RollOut, run: Callable[..., Awaitable[None]]
) -> None:
    async def agent(word: str) -> float:
        await run(graph, {"messages": [("user", f"look up {word}")]})
        return 1.0

    graph = graph_of(chat)
    for episode in await roll_out(agent):
        path, word = path_of(episode), f"w{episode.index}"
        first, *tools, last = texts_of(path)
        assert f'"{word}-1"' in first
        assert sorted(tools) == [f"[about {word}-1]", f"[about {word}-2]"]  # they run concurrently
        assert last == f"[[about {word}-2]]"
        assert [step.finish_reason for step in path.steps] == ["tool_calls", "stop", "stop", "stop"]


async def test_blocking_agent_may_run_the_graph(chat: ChatOpenAI, roll_out: RollOut) -> None:
    def agent(word: str) -> float:
        graph.invoke({"messages": [("user", f"look up {word}")]})
        return 1.0

    graph = graph_of(chat)
    for episode in await roll_out(agent):
        texts = texts_of(path_of(episode))
        assert len(texts) == 4
        assert all(f"w{episode.index}-" in text for text in texts)


class Words(TypedDict):
    words: list[str]
    answers: Annotated[list[str], operator.add]


@pytest.mark.parametrize("blocking", [True, False])
async def test_fan_out_with_send_stays_in_its_rollout(chat: ChatOpenAI, roll_out: RollOut, blocking: bool) -> None:
    def ask(state: dict[str, str]) -> dict[str, Any]:
        return {"answers": [chat.invoke(state["word"]).text]}

    async def ask_async(state: dict[str, str]) -> dict[str, Any]:
        return {"answers": [(await chat.ainvoke(state["word"])).text]}

    def fan_out(state: Words) -> list[Send]:
        return [Send("ask", {"word": word}) for word in state["words"]]

    async def agent(word: str) -> float:
        state = {"words": [f"{word} {n}" for n in range(6)], "answers": []}
        done = await (asyncio.to_thread(graph.invoke, state) if blocking else graph.ainvoke(state))
        assert done["answers"] == [f"[{word} {n}]" for n in range(6)]
        return 1.0

    node: Any = ask if blocking else ask_async
    graph: Any = StateGraph(Words).add_node("ask", node).add_conditional_edges(START, fan_out).add_edge("ask", END)
    graph = graph.compile()
    for episode in await roll_out(agent):
        assert sorted(texts_of(path_of(episode))) == [f"[w{episode.index} {n}]" for n in range(6)]


async def test_graph_may_run_as_several_concurrent_trajectories(chat: ChatOpenAI, roll_out: RollOut) -> None:
    @trajectory(name="explorer")
    async def explore(word: str) -> None:
        await graph.ainvoke({"messages": [("user", f"look up {word}")]})

    async def agent(word: str) -> list[TrajectoryView]:
        paths = await asyncio.gather(*(explore(f"{word}-{letter}") for letter in "ab"))
        for path, reward in zip(paths, (0.0, 1.0), strict=True):
            path.reward = reward
        return paths

    graph = graph_of(chat)
    for episode in await roll_out(agent):
        for path, letter in zip(episode.trajectories, "ab", strict=True):
            texts = texts_of(path)
            assert len(texts) == 4
            assert all(f"w{episode.index}-{letter}-" in text for text in texts)
            assert path.reward == float(letter == "b")


async def test_session_in_a_tool_thread_reaches_the_gateway(chat: ChatOpenAI, roll_out: RollOut) -> None:
    @tool
    def look_up(word: str) -> str:
        """Look up a word."""
        with session(tool="look_up"):
            return chat.invoke(f"about {word}").text

    async def agent(word: str) -> float:
        await graph.ainvoke({"messages": [("user", f"look up {word}")]})
        return 1.0

    graph = graph_of(chat, look_up)
    for episode in await roll_out(agent):
        steps = path_of(episode).steps
        assert [step.info.get("tool") for step in steps] == [None, "look_up", "look_up", None]


async def test_unmodified_chat_model_is_captured(roll_out: RollOut) -> None:
    async def agent(word: str) -> float:
        chat = ChatOpenAI(model="policy")  # it reads OPENAI_BASE_URL and OPENAI_API_KEY, which a rollout sets
        await asyncio.gather(chat.ainvoke(f"{word} task"), asyncio.to_thread(chat.invoke, f"{word} thread"))
        return 1.0

    for episode in await roll_out(agent):
        assert sorted(texts_of(path_of(episode))) == [f"[w{episode.index} task]", f"[w{episode.index} thread]"]


def test_calls_outside_of_sessions_go_to_the_address_of_the_client(server: ModelServer) -> None:
    with get_chat_client(base_url=server.base_url) as client:
        assert ChatOpenAI(model="m", client=client, async_client=client).invoke("hello").text == "hello"
    assert not [name for name in server.received[0].headers if name.startswith("x-rllm")]
