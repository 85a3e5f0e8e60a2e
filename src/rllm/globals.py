"""[shim] The tags around what a model thinks, under the names that users of the framework import."""

from rllm.parser.reasoning import CLOSE as THOUGHT_DELIMITER_END
from rllm.parser.reasoning import OPEN as THOUGHT_DELIMITER_START

__all__ = ["THOUGHT_DELIMITER_END", "THOUGHT_DELIMITER_START"]
