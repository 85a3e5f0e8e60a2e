"""Tokens to HTML: one small element each, in blocks that a browser lays out only when they come into view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rllm.viewer.tokens import TokenTable, shade
from rllm.viewer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from markupsafe import Markup

_BLOCK, _LONGEST_BLOCK = 256, 768
"""Tokens after which a block ends with the next line, and at the latest."""


@dataclass(frozen=True)
class Block:
    """Neighbouring tokens."""

    start: int
    """Position of the first."""
    html: Markup


def blocks(
    table: TokenTable, vocabulary: Vocabulary, overlay: str, *, start: int = 0, stop: int | None = None
) -> Iterator[Block]:
    """The tokens from `start` to `stop` with the classes of an overlay."""
    from markupsafe import Markup

    column = table.columns[overlay]
    classes: dict[tuple[float | None, bool], str] = {}
    signs: dict[int, tuple[str, str]] = {}
    piece: list[str] = []
    first = start
    for place in range(start, len(table) if stop is None else min(stop, len(table))):
        token_id, value = table.ids[place], column[place]
        if token_id not in signs:
            signs[token_id] = _sign(vocabulary, token_id)
        text, extra = signs[token_id]
        key = (value, overlay == "ratio" and table.clipped(place))
        if key not in classes:
            classes[key] = shade(overlay, value, clipped=key[1])
        names = f"{classes[key]}{extra}"
        piece.append(f'<i class="{names}">{text}</i>' if names else f"<i>{text}</i>")
        if len(piece) >= _BLOCK and ("\n" in text or len(piece) >= _LONGEST_BLOCK):
            yield Block(first, Markup("".join(piece)))  # Every piece of text in it was escaped.
            first, piece = place + 1, []
    if piece:
        yield Block(first, Markup("".join(piece)))


def plain(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Tokens as text to read, for templates to escape."""
    return visible("".join(vocabulary.text_of(token_id) for token_id in ids))


def visible(text: str) -> str:
    """Text in which signs that cannot be seen are numbers, but for line breaks and tabs."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else f"⟨{ord(sign):x}⟩" for sign in text)


def one_line(text: str) -> str:
    """Likewise, with line breaks and tabs as signs."""
    return visible(text.replace("\n", "↵").replace("\t", "⇥"))


def _sign(vocabulary: Vocabulary, token_id: int) -> tuple[str, str]:
    """The token's text, escaped, and the class of one that begins with a line break."""
    text = vocabulary.text_of(token_id)
    return escape(visible(text)), " nl" if text.startswith("\n") else ""
