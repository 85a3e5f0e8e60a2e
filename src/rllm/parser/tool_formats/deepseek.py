"""Calls as DeepSeek models write them: a block of calls, each between tokens of its own."""

from __future__ import annotations

import re
from typing import Any

from rllm.parser.tool_formats.calls import is_object, new_call, object_end, skip_space
from rllm.parser.tool_parser import ParsedText, ToolFormat

_BLOCK, _BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekToolParser(ToolFormat):
    """R1 writes `function`, the separator, a name and fenced JSON; V3.1 writes a name, the separator and bare JSON.

    The closing tokens may be missing at the very end. Of a block with good and malformed calls the malformed ones stay
    content, each with its own tokens.
    """

    markers = (_BLOCK,)
    markup = (_BLOCK, _BLOCK_END, _CALL, _CALL_END, _SEPARATOR)
    example = f"{_BLOCK}{_CALL}function{_SEPARATOR}NAME\n```json\n{{ARGUMENTS}}\n```{_CALL_END}{_BLOCK_END}"
    _fenced = re.compile(r"\s*function<｜tool▁sep｜>([^<\n]+)\n```(?:json)?\n")
    _bare = re.compile(r"\s*+([^<\n]+)<｜tool▁sep｜>")
    _next = re.compile(f"{_CALL}|{_BLOCK_END}|{_BLOCK}")

    def parse(self, text: str) -> ParsedText:
        content, calls = list[str](), list[dict[str, Any]]()
        position = 0
        while (start := text.find(_BLOCK, position)) >= 0:
            content.append(text[position:start])
            found, malformed, position = self._block(text, start + len(_BLOCK))
            calls += found
            content.append(malformed if found else text[start:position])
        return ParsedText(content="".join([*content, text[position:]]), tool_calls=calls)

    def _block(self, text: str, position: int) -> tuple[list[dict[str, Any]], str, int]:
        """Return the calls of the block that begins here, the rest of it, and its end."""
        calls: list[dict[str, Any]] = []
        rest: list[str] = []
        while True:
            mark = self._next.search(text, position)
            rest.append(text[position : mark.start() if mark else len(text)].strip())
            if mark is None or mark[0] != _CALL:
                end = len(text) if mark is None else mark.end() if mark[0] == _BLOCK_END else mark.start()
                return calls, "".join(rest), end
            call, position = self._call(text, mark.end())
            if call:
                calls.append(call)
            else:
                rest.append(text[mark.start() : position])

    def _call(self, text: str, start: int) -> tuple[dict[str, Any] | None, int]:
        """Return the call that begins here, if it is well-formed, and its end, or else the next mark."""
        for match_head, closing in ((self._fenced.match, "```"), (self._bare.match, "")):
            found = match_head(text, start)
            end = object_end(text, found.end()) if found else None
            if found is None or end is None or not text.startswith(closing, end):
                continue
            arguments, end = text[found.end() : end].strip(), skip_space(text, end + len(closing))
            if text.startswith(_CALL_END, end):
                end += len(_CALL_END)
            elif end < len(text) and not self._next.match(text, end):
                continue
            if found[1].strip() and is_object(arguments):
                return new_call(found[1].strip(), arguments), end
        mark = self._next.search(text, start)
        return None, mark.start() if mark else len(text)
