"""Rendering of templates. Everything is escaped; functions that templates may call are listed here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from rllm.errors import counted, needed, number, signed
from rllm.store.codec import plain_text
from rllm.types import JSONMapping, why_left_out
from rllm.viewer import charts
from rllm.viewer.graph import KINDS
from rllm.viewer.texts import Vocabulary, message_parts, one_line, plain, visible
from rllm.viewer.tokens import OVERLAYS, TokenTable, shade

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

HERE = Path(__file__).parent


@cache
def environment() -> Environment:
    """Return the environment of templates."""
    with needed("jinja2", "viewer", "the viewer"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        finalize=_in_order,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        number=number,
        seconds=seconds,
        when=when,
        tone=tone,
        message_parts=message_parts,
        one_line=one_line,
        signed=signed,
        counted=counted,
        why_left_out=why_left_out,
    )
    made.globals.update(
        url=url,
        blocks=blocks,
        plain=plain,
        KINDS=KINDS,
        OVERLAYS=OVERLAYS,
        shade=shade,
        chart_size=(charts.WIDTH, charts.HEIGHT),
    )
    return made


_DIRECTIONS = {code: f"⟨{code:x}⟩" for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def _in_order(value: object) -> object:
    """Show characters that change the direction of text as numbers, since they can disguise names."""
    return value.translate(_DIRECTIONS) if type(value) is str and not value.isascii() else value


def render(template: str, context: JSONMapping) -> str:
    """Return the HTML of a page, as text that can always be encoded."""
    return plain_text(environment().get_template(template).render(context))


def url(*parts: object, **query: object) -> str:
    """Return a path of the viewer; parts may have any text, and query fields without a value are omitted."""
    path = "/" + "/".join(quote(plain_text(str(part)), safe="") for part in parts)
    given = {name.rstrip("_"): plain_text(str(value)) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def tone(value: float | None) -> str:
    """Return the class of an advantage: from `d-5`, far below the others, to `d5`; `none` without one."""
    return shade("advantage", value) if value is not None else "none"


def seconds(value: float | None) -> str:
    """Format a duration: 840 ms, 3.2 s, 4:05 min."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 60 else f"{int(value // 60)}:{int(value % 60):02d} min"


def when(value: float) -> str:
    """Format a time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else ""


_BLOCK, _LONGEST_BLOCK = 256, 768
"""Tokens after which a block ends at the next line break, and at the latest."""


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens."""

    start: int
    """Position of the first token."""
    html: Markup


def blocks(
    table: TokenTable, vocabulary: Vocabulary, overlay: str, *, start: int = 0, stop: int | None = None
) -> Iterator[TokenBlock]:
    """Yield the tokens from `start` to `stop` with the classes of an overlay."""
    from markupsafe import Markup

    column = table.columns[overlay]
    classes: dict[tuple[float | None, bool], str] = {}
    signs: dict[int, tuple[str, str]] = {}
    """Escaped text, and the class of a token that begins with a line break."""
    piece: list[str] = []
    first = start
    for place in range(start, len(table) if stop is None else min(stop, len(table))):
        token_id, value = table.ids[place], column[place]
        if token_id not in signs:
            shown = vocabulary.text_of(token_id)
            signs[token_id] = escape(visible(shown)), " nl" if shown.startswith("\n") else ""
        text, extra = signs[token_id]
        key = (value, overlay == "ratio" and table.clipped(place))
        if key not in classes:
            classes[key] = shade(overlay, value, clipped=key[1])
        names = f"{classes[key]}{extra}"
        piece.append(f'<i class="{names}">{text}</i>' if names else f"<i>{text}</i>")
        if len(piece) >= _BLOCK and ("\n" in text or len(piece) >= _LONGEST_BLOCK):
            yield TokenBlock(first, Markup("".join(piece)))  # Every piece of text in it was escaped.
            first, piece = place + 1, []
    if piece:
        yield TokenBlock(first, Markup("".join(piece)))
