"""Messages to token ids through the model's own template, and a model's text to reasoning, answer and tool calls."""

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.compat.chat_template_parser import ChatTemplateParser as ChatTemplateParser
    from rllm.parser.tool_call_parser import QwenToolParser as QwenToolParser
    from rllm.parser.tool_call_parser import R1ToolParser as R1ToolParser
    from rllm.parser.tool_call_parser import ToolCall as ToolCall
    from rllm.parser.tool_call_parser import ToolParser as ToolParser
    from rllm.parser.tool_call_parser import get_tool_parser as get_tool_parser

__all__ = ["ChatTemplateParser", "QwenToolParser", "R1ToolParser", "ToolCall", "ToolParser", "get_tool_parser"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ChatTemplateParser": "rllm.compat.chat_template_parser",
        "ToolCall": "rllm.parser.tool_call_parser",
        **dict.fromkeys(
            ("QwenToolParser", "R1ToolParser", "ToolParser", "get_tool_parser"), "rllm.parser.tool_call_parser"
        ),
    },
)
