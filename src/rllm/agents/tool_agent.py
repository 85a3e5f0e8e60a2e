"""`ToolAgent`: calls tools in the model's own format until it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm.agents.chat_agent import ChatAgent
from rllm.parser.reasoning import CLOSE, OPEN, SplitText
from rllm.parser.tool_call_parser import get_tool_parser
from rllm.parser.tool_parser import tool_parser
from rllm.tools.multi_tool import MultiTool
from rllm.tools.tool_base import Tool
from rllm.types import Message

__path__: list[str] = []  # lets the import hook of rllm.compat explain names that were removed from this module

SYSTEM_PROMPT = """\
You answer questions with the help of tools. Call as many as you need, several at once where they do not depend on each
other. Once you know the answer, give it without calling a tool."""


class ToolAgent(ChatAgent):
    """For `ToolEnvironment`: the action is the list of OpenAI tool calls in the model's text, or its final answer.

    Calls that are only thought about do not count, and malformed ones belong to the text.
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
        """Describe the tools in the system prompt, or leave that to the model's chat template.

        Args:
            system_prompt: what the model is told before the tools' schemas.
            parser_name: the format of calls, a name of `rllm.parser.tool_parser.TOOL_PARSERS`.
            tools: each a tool, a function or a name, as `MultiTool` takes them; the environment gets the same.
            tool_map: names to tool classes, in place of `tools`.
            schemas_in_prompt: False passes the schemas with every model call (`tool_schemas`), so that the chat template
                prints them. The model's text must then come back with its calls in it.
            accumulate_thinking: False leaves earlier turns' thoughts out of prompts.

        Raises:
            ConfigError: if there is no such format, both `tools` and `tool_map` are given, or a tool cannot be made.
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

    def response_to_action(self, response: str) -> list[dict[str, Any]] | str:
        parsed = self._parser.parse(self.split(response).answer)
        return parsed.tool_calls or parsed.content

    def split(self, response: str) -> SplitText:
        """Thought and answer; a closing tag that only stands in a call's arguments closes no thought."""
        closes = CLOSE in response and CLOSE in self._parser.parse(response).content
        if closes or response.lstrip().startswith(OPEN):
            return super().split(response)
        return SplitText("", response)
