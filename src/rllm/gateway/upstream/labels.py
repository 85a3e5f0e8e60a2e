"""Log-probabilities in OpenAI's shape where nobody has the tokens' texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def logprobs_of(token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Log-probabilities in OpenAI's shape; a token is named by its id, as vLLM does on request."""
    entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": entries}
