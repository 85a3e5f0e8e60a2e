"""Messages to token ids through the model's own template, and a model's text to reasoning, answer and tool calls.

* `chat_template.py`: messages to ids. Read it first. `template_shape.py` finds the form of messages that a template
  reads, `bounded_template.py` renders within limits, `control_tokens.py` keeps quoted control tokens text.
* `append_only.py`, `continuation.py`: prompts of later turns, which begin with the sampled tokens.
* `answer.py`: sampled ids to text, reasoning and tool calls, whole or streamed; `decoding.py` is below it.
* `tool_parser.py`, `tool_formats.py`: tool calls, with one row per family of models. `tool_finders.py` finds them in a
  text, and `tool_json.py` reads their arguments.
* `tool_prompt.py`: tools for models whose template knows none.
"""

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.compat.chat_template_parser import ChatTemplateParser as ChatTemplateParser
    from rllm.parser.tool_parser import QwenToolParser as QwenToolParser
    from rllm.parser.tool_parser import R1ToolParser as R1ToolParser
    from rllm.parser.tool_parser import ToolCall as ToolCall
    from rllm.parser.tool_parser import ToolParser as ToolParser
    from rllm.parser.tool_parser import get_tool_parser as get_tool_parser

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.compat.chat_template_parser": "ChatTemplateParser",
        "rllm.parser.tool_parser": "QwenToolParser R1ToolParser ToolCall ToolParser get_tool_parser",
    },
)
