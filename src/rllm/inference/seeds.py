"""Seeds that say what is sampled and never when: an attempt draws the same tokens in whatever order its calls arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import orjson

from rllm.types import Message

_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def derived_seed(*parts: Any) -> int:
    """A seed below 2**53, which JSON keeps exactly everywhere; it depends on the parts and on nothing else."""
    return int.from_bytes(_digest(parts)[:8], "big") >> 11


class CallSeeds:
    """The seeds of a session's calls: the n-th call that asks the same is drawn alike in every run, and unlike the others.

    Calls of one session that ask the same at the same time cannot be told apart: the first to arrive is the first, and over
    HTTP that may be the other one in the next run. Together they say the same in every run.
    """

    def __init__(self) -> None:
        self._asked: Counter[bytes] = Counter()

    def next(
        self,
        base: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> int:
        """The seed of this call, from that of its session; `prompt_ids` are what it asks where it has no messages."""
        asked = _digest([[_without_ids(message) for message in messages] or list(prompt_ids or ()), tools or None])
        self._asked[asked] += 1
        return derived_seed(base, asked.hex(), self._asked[asked])


def _without_ids(message: Message) -> Message:
    """The message without the ids of tool calls, which are made up anew in every run."""
    said = {name: value for name, value in message.items() if name != "tool_call_id"}
    if isinstance(calls := message.get("tool_calls"), list):
        said["tool_calls"] = [
            {name: value for name, value in call.items() if name != "id"} if isinstance(call, Mapping) else call
            for call in calls
        ]
    return said


def _digest(value: Any) -> bytes:
    try:
        text = orjson.dumps(value, default=_plain, option=_OPTIONS)
    except TypeError:  # text that is not Unicode, or integers that are too long
        text = repr(value).encode(errors="backslashreplace")
    return sha256(text).digest()


def _plain(value: Any) -> Any:
    """What stands for a value that is no JSON; nothing with an address in it."""
    for method in ("model_dump", "to_dict", "tolist"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    return type(value).__qualname__
