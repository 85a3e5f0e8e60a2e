"""Log-probabilities in OpenAI's shape, of token ids whose texts are known or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rllm.errors import TokenMismatchError


def logprobs_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    texts: Sequence[str] = (),
    *,
    bytes_of: Callable[[int], bytes] | None = None,
    alternatives: Sequence[Sequence[tuple[int, float]]] = (),
) -> dict[str, Any]:
    """Return log-probabilities in OpenAI's shape; a token without a text is named by its id, as vLLM does on request.

    Args:
        texts: of the tokens, as far as a server gives them.
        bytes_of: the bytes of a token, where they are known and wanted.
        alternatives: of each token, ids and log-probabilities for `top_logprobs`.

    Raises:
        TokenMismatchError: if there are not as many as ids.
    """
    if len(token_ids) != len(logprobs):
        raise TokenMismatchError(
            f"{len(token_ids)} sampled ids but {len(logprobs)} log-probabilities: every id needs one"
        )
    if bytes_of is None:
        names = texts if len(texts) == len(token_ids) else [f"token_id:{token_id}" for token_id in token_ids]
        named = [{"token": name, "bytes": None} for name in names]
    else:
        named = [_named(bytes_of(token_id)) for token_id in token_ids]
    entries: list[dict[str, Any]] = [
        {**name, "logprob": logprob, "top_logprobs": []} for name, logprob in zip(named, logprobs, strict=True)
    ]
    if bytes_of is not None:
        for entry, others in zip(entries, alternatives, strict=False):
            entry["top_logprobs"] = [{**_named(bytes_of(token_id)), "logprob": value} for token_id, value in others]
    return {"content": entries}


def _named(spelled: bytes) -> dict[str, Any]:
    """Return a token's text, in which bytes that are only a part of a character are escaped, and its bytes."""
    return {"token": spelled.decode(errors="backslashreplace"), "bytes": [*spelled]}
