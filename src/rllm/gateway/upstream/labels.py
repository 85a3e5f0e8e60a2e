"""Log-probabilities in OpenAI's shape, of token ids whose texts are seldom known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllm.errors import TokenMismatchError


def logprobs_of(token_ids: Sequence[int], logprobs: Sequence[float], texts: Sequence[str] = ()) -> dict[str, Any]:
    """Log-probabilities in OpenAI's shape; a token without a text is named by its id, as vLLM does on request.

    Raises:
        TokenMismatchError: if there are not as many as ids.
    """
    if len(token_ids) != len(logprobs):
        raise TokenMismatchError(
            f"{len(token_ids)} sampled ids but {len(logprobs)} log-probabilities: every id needs one"
        )
    names = texts if len(texts) == len(token_ids) else [f"token_id:{token_id}" for token_id in token_ids]
    entries: list[dict[str, Any]] = [
        {"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for name, logprob in zip(names, logprobs, strict=True)
    ]
    return {"content": entries}
