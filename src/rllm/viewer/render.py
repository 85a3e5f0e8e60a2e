"""Rendering of templates. Everything is escaped; functions that templates may call are listed here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from rllm.errors import MissingDependencyError, counted, number, signed
from rllm.store.codec import plain_text
from rllm.viewer import charts
from rllm.viewer.messages import message_parts
from rllm.viewer.timeline import KINDS
from rllm.viewer.token_text import blocks, one_line, plain
from rllm.viewer.tokens import OVERLAYS, shade

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent


@cache
def environment() -> Environment:
    """Return the environment of templates.

    Raises:
        MissingDependencyError: if Jinja is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise MissingDependencyError.of("jinja2", "viewer", "the viewer") from error
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


def _in_order(value: Any) -> Any:
    """Show characters that change the direction of text as numbers, since they can disguise names."""
    return value.translate(_DIRECTIONS) if type(value) is str and not value.isascii() else value


def render(template: str, context: Mapping[str, Any]) -> str:
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
