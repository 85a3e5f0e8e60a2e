"""Dialects: translations of the wire formats that agents speak to and from one chat request and answer.

`base.py` has the base class, the checks of requests and shared helpers; `chat.py`, `messages.py`, `responses.py`
(its requests in `responses_input.py`) and `google.py` are dialects, each with a table of its documented fields. Read
`base.py` and `chat.py` first. A new dialect is a module here and a row in
`rllm.capture.wire_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from rllm.capture.wire_formats import WIRE_FORMATS, path_pattern
from rllm.gateway.dialects.base import Dialect, StreamEncoder
from rllm.registry import load_object

__all__ = ["DIALECTS", "CallPath", "Dialect", "StreamEncoder", "dialect_of", "find_call"]

DIALECTS: tuple[Dialect, ...] = tuple(load_object(row.dialect, kind="dialect")() for row in WIRE_FORMATS)
_CHAT = DIALECTS[0]


class CallPath(NamedTuple):
    """Parsed path of a model call."""

    dialect: Dialect
    template: str
    """Its template in `WireFormat.calls` or `counts`."""
    session_id: str | None
    """Session in the path."""
    parameters: Mapping[str, str]
    """Values of the names in the template, and the template as `template`."""


_TEMPLATES = [
    (dialect, template) for dialect in DIALECTS for template in chain(dialect.wire.calls, dialect.wire.counts)
]
_CALLS = "|".join(path_pattern(template) for _, template in _TEMPLATES).replace("?P<model>", "?:")
_VERSIONS = "|".join({"v1alpha", *(row.version for row in WIRE_FORMATS)})
_PATH = re.compile(
    # Some clients add a version of their own to the base URL that they were given, and some a trailing slash.
    rf"(?:/+(?:{_VERSIONS}))*/*(?P<call>{_CALLS})/?"
)
_SESSIONS = "/sessions/"


def find_call(path: str) -> CallPath | None:
    """Return the parsed path of a request, or `None` if the request is not a model call."""
    session_id, call = None, path
    if path.startswith(_SESSIONS):
        session_id, _, call = path.removeprefix(_SESSIONS).partition("/")
        call = f"/{call}"
    found = None if session_id == "" else _matched(call)
    return found and CallPath(found[0], found[1], session_id, found[2])


@lru_cache(maxsize=64)
def _matched(path: str) -> tuple[Dialect, str, Mapping[str, str]] | None:
    """Return the dialect, template and parameters of a path after its session."""
    found = _PATH.fullmatch(path)
    for dialect, template in _TEMPLATES if found is not None else ():
        if found is not None and (named := re.fullmatch(path_pattern(template), found["call"])):
            return dialect, template, MappingProxyType({**named.groupdict(), "template": template})
    return None


def dialect_of(path: str, headers: Container[bytes]) -> Dialect:
    """Return the dialect of any request, by its path or by headers that only clients of one dialect send."""
    if (call := find_call(path)) is not None:
        return call.dialect
    for dialect in DIALECTS:
        own_version = dialect.wire.version != _CHAT.wire.version and f"/{dialect.wire.version}/" in path
        if own_version or any(name.encode() in headers for name in dialect.wire.client_headers):
            return dialect
    return _CHAT
