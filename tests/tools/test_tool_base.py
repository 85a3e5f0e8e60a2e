import asyncio
import functools
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from rllm.errors import ConfigError
from rllm.tools import Tool, ToolOutput


def search(query: str, source: Literal["web", "books"] = "web", limit: int = 3) -> list[str]:
    """Search for documents.

    The best come first.

    Args:
        query: what to look for,
            in plain words
        limit (int): how many to give

    Returns:
        Their titles.
    """
    return [f"{source}: {query}"] * limit


def test_function_describes_itself() -> None:
    assert Tool(function=search).json == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for documents.\n\nThe best come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in plain words"},
                    "source": {"type": "string", "enum": ["web", "books"], "default": "web"},
                    "limit": {"type": "integer", "default": 3, "description": "how many to give"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_call_returns_an_output() -> None:
    output = Tool(function=search)(query="rivers", limit=1)

    assert output == ToolOutput(name="search", output=["web: rivers"])
    assert output.to_string() == '["web: rivers"]'


def test_arguments_are_converted_to_the_declared_types() -> None:
    class Point(BaseModel):
        x: float
        y: float

    def move(point: Point, steps: int) -> list[float]:
        return [point.x * steps, point.y * steps]

    assert Tool(function=move)(point={"x": 1, "y": 2}, steps="3").output == [3.0, 6.0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"query": "a", "limit": "many"}, "argument 'limit' = \"many\": Input should be a valid integer"),
        ({"query": "a", "source": "tv"}, "argument 'source' = \"tv\": Input should be 'web' or 'books'"),
        ({}, "argument 'query' is missing"),
        ({"query": "a", "page": 2}, "argument 'page' is not known: use one of query, source, limit"),
        (["a"], "the arguments must be a JSON object, not ['a']"),
    ],
)
async def test_mismatched_arguments_are_reported(arguments: Any, reason: str) -> None:
    output = await Tool(function=search).call(arguments)

    assert output.output is None
    assert output.error is not None
    assert output.error.startswith("tool 'search' was called wrongly: ")
    assert reason in output.error


def fails(code: int) -> None:
    """Fail with the error of the given code."""
    if code == 0:
        sys.exit("gone")
    raise KeyError("the cause")


@pytest.mark.parametrize(("code", "reason"), [(0, "SystemExit: gone"), (1, "KeyError: 'the cause'")])
async def test_error_in_a_tool_is_returned_as_output(code: int, reason: str) -> None:
    tool = Tool(function=fails)

    for output in (tool(code=code), await tool.call({"code": code})):
        assert output.to_string() == f"Error: tool 'fails' raised {reason}"
        assert output.metadata is not None
        assert "in fails" in output.metadata["traceback"]


async def awaits_a_cancelled_task() -> None:
    lookup = asyncio.create_task(asyncio.sleep(600))
    lookup.cancel()
    await lookup


def awaits_it_in_a_thread() -> None:
    asyncio.run(awaits_a_cancelled_task())


@pytest.mark.parametrize("function", [awaits_a_cancelled_task, awaits_it_in_a_thread])
async def test_cancellation_inside_a_tool_is_its_own(function: Any) -> None:
    tool = Tool(function=function, name="lookup")

    for output in (await tool.call({}), await asyncio.to_thread(tool)):
        assert str(output.error).startswith("tool 'lookup' raised CancelledError")

    waiting = asyncio.create_task(Tool(function=asyncio.sleep, name="wait").call({"delay": 600}))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_pydantic_errors_inside_a_tool_are_its_own() -> None:
    class Row(BaseModel):
        count: int

    def read() -> Row:
        return Row(count="many")  # type: ignore[arg-type]

    assert str(Tool(function=read)().error).startswith("tool 'read' raised ValidationError")


def test_long_output_is_truncated_with_a_note() -> None:
    def flood(kind: str) -> Any:
        return "x" * 1_000 if kind == "text" else ["x" * 995]

    tool = Tool(function=flood, max_output_chars=100)

    assert tool(kind="text").to_string() == "x" * 100 + "\n[cut: 900 of 1000 characters are left out]"
    assert tool(kind="list").to_string().endswith("\n[cut: 899 of 999 characters are left out]")


def test_long_error_is_truncated() -> None:
    def fail() -> None:
        raise ValueError("x" * 1_000)

    assert len(Tool(function=fail, max_output_chars=100)().to_string()) < 200


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_output_that_cannot_be_formatted_is_an_error_of_the_tool() -> None:
    assert Tool(name="mute", function=lambda: Unprintable())().error == "tool 'mute' raised RuntimeError: no words"


def test_outputs_become_text() -> None:
    circle: list[Any] = []
    circle.append(circle)

    assert ToolOutput("t", output={"a": "é"}).to_string() == '{"a": "é"}'
    assert f"{ToolOutput('t', output=[1])} {ToolOutput('t', error='gone')}" == "[1] Error: gone"
    assert ToolOutput("t", output={"a": Path("b")}).to_string() == '{"a": "b"}'
    assert ToolOutput("t", output={(1, 2): 3}).to_string() == "{(1, 2): 3}"
    assert ToolOutput("t", output=circle).to_string() == "[[...]]"
    assert ToolOutput("t", output=1.5).to_string() == "1.5"
    assert ToolOutput("t").to_string() == ""
    assert ToolOutput("t", output=1, error="no").to_string() == "Error: no"


class Greeter(Tool):
    """Greet a person."""

    def __init__(self, greeting: str) -> None:
        super().__init__(name="greet")
        self.greeting = greeting

    def forward(self, who: Annotated[str, Field(description="the name")]) -> ToolOutput:
        return ToolOutput("greet", output=f"{self.greeting}, {who}", metadata={"polite": True})


def test_subclass_has_its_own_forward() -> None:
    tool = Greeter("hello")

    assert tool.json["function"]["description"] == "Greet a person."
    assert tool.json["function"]["parameters"]["properties"] == {"who": {"type": "string", "description": "the name"}}
    assert tool(who="Ada") == ToolOutput("greet", output="hello, Ada", metadata={"polite": True})
    assert tool("Ada").output == "hello, Ada"


class Doubler(Tool):
    """Double a number, in an event loop."""

    async def async_forward(self, x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x


async def test_async_tool_can_be_called_from_anywhere() -> None:
    async def triple(x: int) -> int:
        await asyncio.sleep(0)
        return 3 * x

    for tool, expected in (Doubler(), 8), (Tool(function=triple), 12):
        assert (await tool.call({"x": 4})).output == expected
        assert tool(x=4).output == expected  # in a running loop
        assert (await asyncio.to_thread(tool, x=4)).output == expected


async def test_call_may_be_awaited_as_in_the_rllm_framework() -> None:
    tool = Tool(function=search)
    assert await tool("rivers", limit=1, use_async=True) == tool("rivers", limit=1)
    assert (
        await tool(limit=1, use_async=True)
    ).error == "tool 'search' was called wrongly: argument 'query' is missing"


async def test_blocking_tool_runs_in_a_thread() -> None:
    """The two calls meet at the barrier, so they run at the same time, outside of the loop."""
    barrier = threading.Barrier(2, timeout=60)
    tool = Tool(name="meet", function=lambda: barrier.wait() >= 0)

    outputs = await asyncio.gather(tool.call({}), tool.call({}))

    assert [output.output for output in outputs] == [True, True]


class Nothing(Tool):
    """A tool without a `forward`."""


def test_tool_without_implementation_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'Nothing' has nothing to call: pass `function`, or define `forward`"):
        Nothing()


def test_function_passed_as_the_name_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"tool name=<.*: pass a function by its name, as Tool\(function=...\)"):
        Tool(print)  # type: ignore[arg-type]


def by_position(x: int, /) -> None: ...


def strange(x: threading.Thread) -> None: ...


class Cat(BaseModel):
    kind: str


class Dog(BaseModel):
    kind: str


def pet(x: Annotated[Cat | Dog, Field(discriminator="kind")]) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "tool name '<lambda>': use 1 to 64 letters"),
        (by_position, r"by_position.*remove '/' and '\*args'"),
        (pet, r"pet\(x: .*Model 'Cat' needs field 'kind' to be of type `Literal`; use types that JSON has"),
        (strange, r"strange\(x: .*Thread.*use types that JSON has"),
    ],
)
def test_function_unsuitable_for_models_is_rejected(function: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Tool(function=function)


def test_arguments_bound_by_a_partial_are_hidden_from_the_model() -> None:
    tool = Tool(function=functools.partial(search, source="books"))
    assert (tool.name, tool.description) == ("search", "Search for documents.\n\nThe best come first.")
    assert (
        tool.json["function"]["parameters"]["properties"]["query"]["description"] == "what to look for, in plain words"
    )
    assert list(tool.json["function"]["parameters"]["properties"]) == ["query", "limit"]
    assert tool(query="rivers", limit="1").output == ["books: rivers"]
    assert "'source' is not known" in str(tool(query="rivers", source="web").error)


class Shout:
    """Repeat it in capitals."""

    def __call__(self, text: str) -> str:
        return text.upper()


class AsyncShout:
    async def __call__(self, text: str) -> str:
        return text.upper()


async def shout(text: str) -> str:
    return text.upper()


def decorated(text: str) -> Any:
    return shout(text)


@pytest.mark.parametrize("function", [Shout(), AsyncShout(), functools.partial(shout), decorated])
async def test_any_callable_is_a_tool_and_its_result_is_awaited(function: Any) -> None:
    tool = Tool(function=function)
    assert (await tool.call({"text": "hi"})).output == "HI"
    assert tool(text="hi").output == "HI"
    assert (await tool.call({"text": [1]})).error is not None


def test_callable_object_is_named_after_its_class() -> None:
    tool = Tool(function=Shout())
    assert (tool.name, tool.description) == ("Shout", "Repeat it in capitals.")
