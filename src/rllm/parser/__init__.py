"""Messages to token ids through the model's own template, and a model's text to reasoning, answer and tool calls."""

from rllm.parser.chat_template_parser import ChatTemplateParser
from rllm.parser.tool_call import ToolCall
from rllm.parser.tool_call_parser import QwenToolParser, R1ToolParser, ToolParser, get_tool_parser

__all__ = ["ChatTemplateParser", "QwenToolParser", "R1ToolParser", "ToolCall", "ToolParser", "get_tool_parser"]
