"""Token ids back to text, and text to reasoning and answer.

Special tokens are left out, except those that parsers look for. `TokenBytes` has the bytes of each token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class SplitText:
    """A model's text in its two parts."""

    reasoning: str
    answer: str


def split_reasoning(text: str, *, starts_open: bool = False, tags: tuple[str, str] = (OPEN, CLOSE)) -> SplitText:
    """Split `<think>reasoning</think>answer`.

    Newlines around the tags belong to the tags: chat templates print them. `starts_open` means that the prompt already
    ended in `<think>`. Reasoning that was never closed leaves no answer; text that does not start with the tag is all
    answer. `tags` may be another model family's tags.
    """
    opening, closing = tags
    body = text.lstrip()
    if body.startswith(opening):
        body = body[len(opening) :]
    elif not starts_open:
        return SplitText("", text)
    else:
        body = text
    reasoning, closed, answer = body.partition(closing)
    return SplitText(reasoning.strip("\n"), answer.lstrip("\n") if closed else "")


def join_reasoning(reasoning: str, answer: str) -> str:
    """Return the text that `split_reasoning` splits into these parts, as chat templates print it."""
    return f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{answer}" if reasoning else answer


def split_without_prompt(text: str) -> SplitText:
    """Split a text whose prompt is unknown: it may have opened a thought that is closed in the text."""
    before, closed, _ = text.partition(CLOSE)
    return split_reasoning(text, starts_open=bool(closed) and OPEN not in before)


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MARKUP = (OPEN, CLOSE, "<tool_call>", "</tool_call>")
"""Tags that parsers look for, whatever the format."""


class Tokenizer(Protocol):
    """Methods of a `transformers` tokenizer that this package uses; its attributes differ from class to class."""

    chat_template: Any
    all_special_tokens: list[str]
    special_tokens_map: dict[str, Any]
    unk_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], **options: bool) -> str: ...

    def get_chat_template(self, name: str | None = None, tools: Any = None) -> str: ...

    def apply_chat_template(self, messages: Any, **options: Any) -> Any: ...

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    def get_added_vocab(self) -> dict[str, int]: ...


def special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the strings of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marked = (token.content for token in added if token.special)
    return frozenset(filter(None, (*tokenizer.all_special_tokens, *marked)))


class TextDecoder:
    """Decoder of a tokenizer's ids, without its special tokens.

    Tokens that parsers look for stay, even if the tokenizer calls them special: reasoning tags, and `markup`.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int] = (), markup: Iterable[str] = ()) -> None:
        """`end_ids`: ids that end an answer, in addition to the special tokens."""
        self._tokenizer = tokenizer
        kept = {tokenizer.convert_tokens_to_ids(token) for token in (*MARKUP, *markup)}
        kept.discard(tokenizer.unk_token_id)
        special = tokenizer.convert_tokens_to_ids(sorted(special_tokens(tokenizer)))
        self._hidden = frozenset((*special, *end_ids)) - kept

    def text(self, ids: Iterable[int]) -> str:
        visible = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(visible, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class TokenBytes:
    """The UTF-8 bytes of each token of a tokenizer; many tokens are only a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = repr(getattr(backend, "decoder", None))
        self._is_byte_level = "ByteLevel" in decoder or hasattr(tokenizer, "byte_decoder")
        self._added = {number: text for text, number in tokenizer.get_added_vocab().items()}

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that the model has and the tokenizer lacks."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return b""
        return byte_level_bytes(piece) if self._is_byte_level else metaspace_bytes(piece)


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, such as GPT-2's."""
    return b"".join(_BYTES[sign] if sign in _BYTES else sign.encode() for sign in piece)


def metaspace_bytes(piece: str) -> bytes:
    """Return the bytes of a token of a vocabulary such as SentencePiece's."""
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace("▁", " ").encode()


def _signs_of_bytes() -> dict[str, bytes]:
    """Return the printable characters of bytes in byte-level tokenizers: most are themselves, others from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    signs = {chr(value): bytes([value]) for value in plain}
    return signs | {chr(256 + place): bytes([value]) for place, value in enumerate(others)}


_BYTES = _signs_of_bytes()
