"""The agent's view of an answer: token fields are removed unless its own request asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ID_FIELDS = ("prompt_token_ids", "token_ids", "response_token_ids")
"""Asked for with `return_token_ids: true`; the first stands in the response or in each choice, and the last is SGLang's."""


def strip_chunk(chunk: dict[str, Any], *, asked: Mapping[str, Any]) -> None:
    """Leave of a chat completion, or of one chunk of a stream, what this request would have got from the server.

    Args:
        chunk: the server's answer, whose own dictionaries are changed, because this is the hot path.
        asked: the agent's own request; `logprobs: true` keeps log-probabilities, `return_token_ids: true` keeps ids.
    """
    keep_ids, keep_logprobs = asked.get("return_token_ids"), asked.get("logprobs")
    if not keep_ids:
        for name in _ID_FIELDS:
            chunk.pop(name, None)
    for choice in chunk.get("choices") or ():
        if not keep_ids:
            for name in _ID_FIELDS:
                choice.pop(name, None)
        if not keep_logprobs and choice.get("logprobs") is not None:
            # OpenAI answers null where log-probabilities were not asked for.
            choice["logprobs"] = None
