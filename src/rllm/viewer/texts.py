"""Text for display: chat messages in parts, and tokens from their bytes in `tokenizer.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import orjson

from rllm._runtime.untrusted import read_json
from rllm.parser.decoding import byte_level_bytes, metaspace_bytes
from rllm.types import JSONObject

_SHORT = 80
"""Longest JSON on one line."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class MessageParts:
    """One message."""

    role: str
    kind: str
    """Its class in the style sheet."""
    name: str = ""
    text: str = ""
    reasoning: str = ""
    tools: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each tool call."""


def message_parts(message: object) -> MessageParts:
    """Split a message into parts; a value that is not a message becomes text."""
    if not isinstance(message, Mapping):
        return MessageParts(role="?", kind="other", text=pretty(message))
    role = str(message.get("role") or "?")
    text = _text(message.get("content"))
    calls = message.get("tool_calls")
    return MessageParts(
        role=role,
        kind=role if role in _ROLES else "other",
        name=str(message.get("name") or ""),
        text=pretty(text) if role == "tool" else text,
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        tools=[_call(call) for call in calls] if isinstance(calls, list) else [],
    )


def fields_of(task: object) -> dict[str, str]:
    """Return the fields of a task; a task without fields is one field."""
    fields = task if isinstance(task, Mapping) else {} if task is None else {"task": task}
    lines = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in fields.items()}
    return {str(name): value if isinstance(value, str) else pretty(lines[name]) for name, value in fields.items()}


def pretty(value: object) -> str:
    """Indent arguments and results that are JSON."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if not isinstance(found, dict | list) or len(value) < _SHORT:
            return value
        value = found
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return pretty(content)
    parts = [part if isinstance(part, Mapping) else {"type": type(part).__name__} for part in content]
    return "".join(
        part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]" for part in parts
    )


def _call(call: object) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "?", pretty(call)
    return str(function.get("name")), pretty(function.get("arguments"))


class Vocabulary:
    """Bytes of all known token ids."""

    def __init__(self, bytes_of: Mapping[int, bytes] | None = None) -> None:
        self._bytes_of = bytes_of or {}

    def __bool__(self) -> bool:
        return bool(self._bytes_of)

    def hex_of(self, token_id: int) -> str:
        """Return the bytes of a token in hex; empty if they are unknown."""
        found = self._bytes_of.get(token_id)
        return "" if found is None else found.hex(" ")

    def text_of(self, token_id: int) -> str:
        """Return a token for display: text, hex bytes for part of a character, or its id."""
        found = self._bytes_of.get(token_id)
        if found is None:
            return f"⟨{token_id}⟩"
        try:
            return found.decode()
        except UnicodeDecodeError:
            return f"⟨{found.hex(' ')}⟩"

    def decode(self, ids: Iterable[int]) -> str:
        """Decode several tokens as one text, with replacement characters for incomplete ones."""
        return b"".join(self._bytes_of.get(item, b"?") for item in ids).decode(errors="replace")


def vocabulary_of(folder: Path | None, model: str | None) -> Vocabulary:
    """Return the vocabulary of a run: from its newest checkpoint, the model's folder, or the hub's cache."""
    for path in _places(folder, model):
        try:
            return _read(path, path.stat().st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the next place may have a readable one
    return Vocabulary()


def _places(folder: Path | None, model: str | None) -> Iterable[Path]:
    if folder is not None:
        yield from sorted(folder.glob("checkpoints/step-*/tokenizer.json"), reverse=True)
    if model:
        yield Path(model).expanduser() / "tokenizer.json"
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        yield from home.glob(f"hub/models--{model.replace('/', '--')}/snapshots/*/tokenizer.json")


@lru_cache(maxsize=4)
def _read(path: Path, _changed_at: int) -> Vocabulary:
    found: JSONObject = read_json(path)
    model = found["model"]
    vocab = model["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], number) for number, item in enumerate(vocab))
    is_byte_level = b'"ByteLevel"' in orjson.dumps([found.get("decoder"), found.get("pre_tokenizer")])
    to_bytes = byte_level_bytes if is_byte_level else metaspace_bytes
    bytes_of = {number: to_bytes(piece) for piece, number in pairs}
    bytes_of.update({item["id"]: item["content"].encode() for item in found.get("added_tokens") or ()})
    return Vocabulary(bytes_of)


def plain(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Return tokens as readable text, for templates to escape."""
    return visible("".join(vocabulary.text_of(token_id) for token_id in ids))


def visible(text: str) -> str:
    """Replace invisible characters by their code points, except line breaks and tabs."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else f"⟨{ord(sign):x}⟩" for sign in text)


def one_line(text: str) -> str:
    """Replace invisible characters as `visible` does, and line breaks and tabs by symbols."""
    return visible(text.replace("\n", "↵").replace("\t", "⇥"))
