"""Text of tokens: their bytes from `tokenizer.json`, and their HTML in blocks that browsers lay out lazily."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rllm._runtime.untrusted import read_json
from rllm.parser.decoding import byte_level_bytes, metaspace_bytes
from rllm.viewer.tokens import TokenTable, shade

if TYPE_CHECKING:
    from markupsafe import Markup


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
    found: dict[str, Any] = read_json(path)
    model = found["model"]
    vocab = model["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], number) for number, item in enumerate(vocab))
    is_byte_level = b'"ByteLevel"' in orjson.dumps([found.get("decoder"), found.get("pre_tokenizer")])
    to_bytes = byte_level_bytes if is_byte_level else metaspace_bytes
    bytes_of = {number: to_bytes(piece) for piece, number in pairs}
    bytes_of.update({item["id"]: item["content"].encode() for item in found.get("added_tokens") or ()})
    return Vocabulary(bytes_of)


_BLOCK, _LONGEST_BLOCK = 256, 768
"""Tokens after which a block ends at the next line break, and at the latest."""


@dataclass(frozen=True)
class Block:
    """Consecutive tokens."""

    start: int
    """Position of the first token."""
    html: Markup


def blocks(
    table: TokenTable, vocabulary: Vocabulary, overlay: str, *, start: int = 0, stop: int | None = None
) -> Iterator[Block]:
    """Yield the tokens from `start` to `stop` with the classes of an overlay."""
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
    """Return tokens as readable text, for templates to escape."""
    return visible("".join(vocabulary.text_of(token_id) for token_id in ids))


def visible(text: str) -> str:
    """Replace invisible characters by their code points, except line breaks and tabs."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else f"⟨{ord(sign):x}⟩" for sign in text)


def one_line(text: str) -> str:
    """Replace invisible characters as `visible` does, and line breaks and tabs by symbols."""
    return visible(text.replace("\n", "↵").replace("\t", "⇥"))


def _sign(vocabulary: Vocabulary, token_id: int) -> tuple[str, str]:
    """Return the token's escaped text, and the class of one that begins with a line break."""
    text = vocabulary.text_of(token_id)
    return escape(visible(text)), " nl" if text.startswith("\n") else ""
