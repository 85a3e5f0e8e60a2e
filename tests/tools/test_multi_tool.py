from functools import partial

import pytest

from rllm.errors import ConfigError
from rllm.tools import MultiTool, Tool, ToolCall, ToolRegistry, tool_registry
from rllm.tools.calculator import Calculator
from rllm.tools.python_tool import PythonInterpreter


def shout(text: str) -> str:
    """Repeat it in capitals."""
    return text.upper()


async def test_tool_is_chosen_by_name() -> None:
    tools = MultiTool(tools=["calculator", shout, Tool(name="whisper", function=shout)])

    assert [schema["function"]["name"] for schema in tools.json] == ["calculator", "shout", "whisper"]
    assert (await tools.call(ToolCall("shout", {"text": "hi"}))).output == "HI"
    assert tools("calculator", expression="6 * 7").output == 42
    assert tools(tool_name="calculator", expression="6 * 7").output == 42


async def test_map_sets_the_names_of_tools() -> None:
    tools = MultiTool(tool_map={"code": PythonInterpreter, "sums": Calculator})

    assert list(tools.tools) == ["code", "sums"]
    assert list(MultiTool(tool_map={"sums": partial(Calculator, description="adds")}).tools) == ["sums"]  # type: ignore[dict-item]
    assert (await tools.call(ToolCall("code", {"code": "1 + 1"}))).output == "2\n"


async def test_unknown_name_error_lists_the_known_ones() -> None:
    tools = MultiTool(tools=["calculator", shout])

    for output in (tools("sing"), await tools.call(ToolCall("sing"))):
        assert output.to_string() == "Error: there is no tool 'sing'; use one of calculator, shout"


def test_invalid_sets_of_tools_are_rejected() -> None:
    with pytest.raises(ConfigError, match="either `tools` or `tool_map`"):
        MultiTool(tools=[], tool_map={})
    with pytest.raises(ConfigError, match=r"\['shout', 'shout'\]: two tools have the same name"):
        MultiTool(tools=[shout, shout])
    with pytest.raises(ConfigError, match="tools='calculator': give a list"):
        MultiTool(tools="calculator")
    with pytest.raises(ConfigError, match=r"tools=<function sho.*: give a list"):
        MultiTool(tools=shout)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dict is a class"):
        MultiTool(tools=[dict])
    with pytest.raises(ConfigError, match="tools: 7: pass a Tool"):
        MultiTool(tools=[7])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"tool 'sums' is <rllm.*, which creates no tool: name a subclass"):
        MultiTool(tool_map={"sums": Calculator()})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"tool 'loud' is <function sho.*: .*argument 'name'; name a subclass"):
        MultiTool(tool_map={"loud": shout})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"tool 'math:sqrt' is <built-in function sqrt>: .* or put the function"):
        MultiTool(tools=["math:sqrt"])
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        MultiTool(tools=["calculater"])


def test_registry_maps_names_to_classes() -> None:
    assert sorted(tool_registry) == ["calculator", "local_search", "python"]
    assert tool_registry["python"] is PythonInterpreter
    assert tool_registry.get("web") is None
    assert tool_registry.instantiate("python", timeout_s=1).name == "python"


def test_registry_accepts_further_names() -> None:
    registry = ToolRegistry({})
    registry.register("sums", "rllm.tools.calculator:Calculator")
    registry.register("figures", Calculator)

    assert registry.instantiate("sums")(expression="1 + 1").output == 2
    assert registry.instantiate("figures")(expression="1 + 2").output == 3
    assert registry["figures"] is registry["sums"] is Calculator
    assert len(registry) == 2
    with pytest.raises(ConfigError, match=r"tool='figurs' is not known: .*figures"):
        registry.instantiate("figurs")
