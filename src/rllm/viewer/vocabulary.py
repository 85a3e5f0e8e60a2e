"""Token ids to their bytes, read from a model's `tokenizer.json`: no tokenizer needs to be installed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from rllm._runtime.untrusted import read_json
from rllm.parser.decoding import byte_level_bytes, metaspace_bytes


class Vocabulary:
    """The bytes of every id that is known."""

    def __init__(self, bytes_of: Mapping[int, bytes] | None = None) -> None:
        self._bytes_of = bytes_of or {}

    def __bool__(self) -> bool:
        return bool(self._bytes_of)

    def hex_of(self, token_id: int) -> str:
        """Its bytes in hex; empty if nobody knows them."""
        found = self._bytes_of.get(token_id)
        return "" if found is None else found.hex(" ")

    def text_of(self, token_id: int) -> str:
        """The token to look at: text where it is text, its bytes in hex where it is a part of a character, else its id."""
        found = self._bytes_of.get(token_id)
        if found is None:
            return f"⟨{token_id}⟩"
        try:
            return found.decode()
        except UnicodeDecodeError:
            return f"⟨{found.hex(' ')}⟩"

    def decode(self, ids: Iterable[int]) -> str:
        """Several tokens as one text; a part of a character in it becomes a replacement sign."""
        return b"".join(self._bytes_of.get(item, b"?") for item in ids).decode(errors="replace")


def vocabulary_of(folder: Path | None, model: str | None) -> Vocabulary:
    """That of a run: from its newest checkpoint, from the model's folder, or from what the hub's cache has of it."""
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
    told: dict[str, Any] = read_json(path)
    model = told["model"]
    vocab = model["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], number) for number, item in enumerate(vocab))
    is_byte_level = b'"ByteLevel"' in orjson.dumps([told.get("decoder"), told.get("pre_tokenizer")])
    to_bytes = byte_level_bytes if is_byte_level else metaspace_bytes
    bytes_of = {number: to_bytes(piece) for piece, number in pairs}
    bytes_of.update({item["id"]: item["content"].encode() for item in told.get("added_tokens") or ()})
    return Vocabulary(bytes_of)
