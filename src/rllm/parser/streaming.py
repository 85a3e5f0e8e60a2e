"""How much of an unfinished answer may be shown already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rllm.parser.reasoning import CLOSE, OPEN, split_reasoning


def safe_length(text: str, markers: Iterable[str]) -> int:
    """The length of the longest prefix of `text` that no marker, complete or still being written, reaches into.

    >>> safe_length("Wait.\\nUser", ["\\nUser:"])
    5
    """
    return min((_length_before(text, marker) for marker in markers), default=len(text))


def _length_before(text: str, marker: str) -> int:
    complete = text.find(marker)
    if complete >= 0:
        return complete
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


def visible_content(
    text: str,
    *,
    stop: Sequence[str] = (),
    markers: Sequence[str] = (),
    opening_markers: Sequence[str] = (),
    starts_open: bool = False,
) -> str:
    """The part of an unfinished answer's content that stays as it is, whatever the model writes next.

    `stop` strings end the whole text; `markers` begin a tool call, and so do `opening_markers` where the content begins
    with one. Reasoning is not content.
    """
    text = text[: safe_length(text, stop)]
    body = text.lstrip()
    if starts_open or body.startswith(OPEN):
        if CLOSE not in text:
            return ""
    elif OPEN.startswith(body):  # it may still become reasoning
        return ""
    content = split_reasoning(text, starts_open=starts_open).answer
    start = content.lstrip()
    if any(start.startswith(marker) or marker.startswith(start) for marker in opening_markers):
        return ""
    return content[: safe_length(content, markers)]


def visible_reasoning(text: str, *, stop: Sequence[str] = (), starts_open: bool = False) -> str:
    """The part of an unfinished answer's reasoning that stays as it is, whatever the model writes next."""
    text = text[: safe_length(text, stop)]
    body = text.lstrip()
    if OPEN.startswith(body):  # the tag itself may still follow
        return ""
    if not starts_open and not body.startswith(OPEN):
        return ""
    return split_reasoning(text[: safe_length(text, [CLOSE])], starts_open=starts_open).reasoning
