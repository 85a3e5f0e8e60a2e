"""`ToolAgent`: calls tools in the model's own format until it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm.agents.chat_agent import ChatAgent
from rllm.parser.decoding import CLOSE, OPEN, SplitText
from rllm.parser.tool_parser import get_tool_parser, tool_parser
from rllm.tools.multi_tool import MultiTool
from rllm.tools.tool_base import Tool
from rllm.types import JSONObject, Message

__path__: list[str] = []  # lets the import hook of rllm.compat explain names that were removed from this module

SYSTEM_PROMPT = """\
You answer questions with the help of tools. Call as many as you need, several at once where they do not depend on each
other. Once you know the answer, give it without calling a tool."""


class ToolAgent(ChatAgent):
    """Agent for `ToolEnvironment`: the action is the list of tool calls in the model's text, or its final answer.

    Calls inside the reasoning do not count; malformed ones are part of the text.
    """

    def __init__(
        self,
        system_prompt: str = SYSTEM_PROMPT,
        parser_name: str = "qwen",
        tools: Sequence[Tool | str | Callable[..., Any]] | None = None,
        tool_map: Mapping[str, type[Tool]] | None = None,
        *,
        schemas_in_prompt: bool = True,
        accumulate_thinking: bool = True,
    ) -> None:
        """Describe the tools in the system prompt, or let the model's chat template do it.

        Args:
            system_prompt: text before the tools' schemas.
            parser_name: the format of calls, a name of `rllm.parser.tool_parser.TOOL_FORMATS`.
            tools: tools, functions or names, as `MultiTool` takes them; pass the same to the environment.
            tool_map: names to tool classes, instead of `tools`.
            schemas_in_prompt: False passes the schemas with every model call (`tool_schemas`), for the chat template to
                print. The model's text must then include its calls.
            accumulate_thinking: False omits the reasoning of earlier turns from prompts.

        Raises:
            ConfigError: if the format does not exist, both `tools` and `tool_map` are given, or a tool cannot
                be created.
        """
        self.tools = MultiTool(tools, tool_map)
        self.tool_schemas = None if schemas_in_prompt else self.tools.json
        self._parser = tool_parser(parser_name).for_tools(self.tools.json)
        if schemas_in_prompt and self.tools.json:
            schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.tools.json)
            system_prompt = f"{system_prompt}\n\n{get_tool_parser(parser_name)().get_tool_prompt(schemas)}".strip()
        super().__init__(system_prompt=system_prompt, accumulate_thinking=accumulate_thinking)

    def observation_to_messages(self, observation: Any) -> list[Message]:
        if not isinstance(observation, Mapping) or "tool_outputs" not in observation:
            return super().observation_to_messages(observation)
        return [
            {"role": "tool", "tool_call_id": call_id, "content": text}
            for call_id, text in observation["tool_outputs"].items()
        ]

    def response_to_action(self, response: str) -> list[JSONObject] | str:
        parsed = self._parser.parse(self.split(response).answer)
        return parsed.tool_calls or parsed.content

    def split(self, response: str) -> SplitText:
        """Split into reasoning and answer; a closing tag inside a call's arguments does not end the reasoning."""
        closes = CLOSE in response and CLOSE in self._parser.parse(response).content
        if closes or response.lstrip().startswith(OPEN):
            return super().split(response)
        return SplitText("", response)
