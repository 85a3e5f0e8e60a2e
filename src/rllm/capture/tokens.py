"""Tokens of one sampled answer, taken from the wire and checked against each other.

Nothing is guessed: a missing field is named, and never filled with zeros (a log-probability of zero would mean
certainty).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rllm.errors import TokenMismatchError
from rllm.types import JSONMapping

TOKEN_ID_PREFIX = "token_id:"
"""Prefix of a token's text in `logprobs` if the request had `return_tokens_as_token_ids: true`."""

LOGPROB_TOLERANCE = 1e-4
"""Largest accepted log-probability: rounding in a server's log-softmax can put it above 0 for certain tokens."""


class AnswerTokens(NamedTuple):
    """Exact ids of one prompt and one answer, with a log-probability for each id of the answer."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    problem: str | None
    """Reason why these cannot be trained on; `None` if they can."""


def tokens_of_choice(response: JSONMapping, choice: JSONMapping, index: int) -> AnswerTokens:
    """Return the tokens of one choice of a chat completion, in the form of vLLM or SGLang.

    Prompt ids are `prompt_token_ids` of the response or of the choice; answer ids are `token_ids` of the choice, in
    SGLang's answers `response_token_ids`, or the `"token_id:123"` texts of its log-probabilities. Log-probabilities are
    in the entries of `logprobs.content`, or are the bare numbers of `logprobs.token_logprobs`. Prompt ids in an
    array, as returned by `packed_ids`, stay in it.

    Raises:
        TokenMismatchError: if the fields contradict each other. Missing fields are a `problem` instead.
    """
    where = f"choices[{index}]"
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content")
    numbers = logprobs.get("token_logprobs")
    prompt_ids: Any = response.get("prompt_token_ids")
    if prompt_ids is None:
        prompt_ids = choice.get("prompt_token_ids")
    is_packed = isinstance(prompt_ids, array)
    response_ids = choice.get("token_ids")
    if response_ids is None:
        response_ids = choice.get("response_token_ids")
    if not isinstance(content, list | None):
        raise TokenMismatchError(f"{where}.logprobs.content={_start_of(content)}: expected a list of entries")
    if content is not None:  # and its entries are objects from here on
        try:
            numbers = [*(numbers or ()), *(entry["logprob"] for entry in content)]
        except (TypeError, KeyError) as error:
            raise TokenMismatchError(
                f"{where}.logprobs.content={_start_of(content)}: every entry needs a 'logprob'"
            ) from error
    labelled_ids = _ids_in_labels(content, where)
    if numbers is None and isinstance(response_ids, list) and not response_ids:
        numbers = []
    if response_ids is None:
        response_ids = labelled_ids
    elif labelled_ids is not None and labelled_ids != response_ids:
        raise TokenMismatchError(
            f"{where}.token_ids={_start_of(response_ids)} and the ids in {where}.logprobs.content="
            f"{_start_of(labelled_ids)} differ: the server contradicts itself, so neither can be trained on"
        )
    tokens = AnswerTokens(
        prompt_ids=prompt_ids if is_packed else _checked_ids(prompt_ids, "prompt_token_ids"),
        response_ids=_checked_ids(response_ids, f"{where}.token_ids"),
        logprobs=_checked_logprobs(numbers, f"{where}.logprobs.content"),
        problem=_problem(prompt_ids, response_ids, numbers, where),
    )
    if response_ids is not None and numbers is not None and len(tokens.response_ids) != len(tokens.logprobs):
        raise TokenMismatchError(
            f"{where}.token_ids has {len(tokens.response_ids)} ids ({_start_of(tokens.response_ids)}) and "
            f"{where}.logprobs.content has {len(tokens.logprobs)} entries ({_start_of(tokens.logprobs)}): every "
            "sampled id needs one log-probability; use a server that returns both for the same tokens (vLLM >= 0.10.2)"
        )
    return tokens


def check_aligned(response_ids: Sequence[object], logprobs: Sequence[object], *, where: str = "") -> None:
    """Raise `TokenMismatchError` unless each sampled id has one log-probability; `where` precedes the message."""
    if len(response_ids) != len(logprobs):
        counts = f"{len(response_ids)} sampled ids but {len(logprobs)} log-probabilities"
        raise TokenMismatchError(f"{where}{counts}: every id needs one")


def check_tokens(prompt_ids: list[int], response_ids: list[int], logprobs: list[float], *, where: str) -> str | None:
    """Return the reason why the tokens of an answer cannot be trained on; `None` if they can.

    Raises:
        TokenMismatchError: if they contradict each other or themselves.
    """
    _checked_ids(prompt_ids, f"{where}: prompt_ids")
    _checked_ids(response_ids, f"{where}: completion_ids")
    _checked_logprobs(logprobs, f"{where}: logprobs")
    if not (prompt_ids and response_ids and logprobs):
        given = {"prompt_ids": prompt_ids, "completion_ids": response_ids, "logprobs": logprobs}
        missing = [name for name, values in given.items() if not values]
        return f"{where}: the engine returned no {' and no '.join(missing)}"
    check_aligned(response_ids, logprobs, where=f"{where}: ")
    return None


def has_labels(content: Sequence[object]) -> bool:
    """Return True if the entries of `logprobs.content` have ids instead of texts."""
    first = content[0] if content else None
    return isinstance(first, Mapping) and str(first.get("token", "")).startswith(TOKEN_ID_PREFIX)


def _ids_in_labels(content: Sequence[JSONMapping] | None, where: str) -> list[int] | None:
    """Return the ids written as `"token_id:123"`, or `None` if the entries have texts."""
    if not content or not has_labels(content):
        return None
    labels = [str(entry.get("token", "")) for entry in content]
    try:
        return [int(label.removeprefix(TOKEN_ID_PREFIX)) for label in labels]
    except ValueError as error:
        raise TokenMismatchError(
            f"{where}.logprobs.content mixes {TOKEN_ID_PREFIX!r} labels with text: {_start_of(labels)}"
        ) from error


def _checked_ids(ids: object, field: str) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, list):
        raise TokenMismatchError(f"{field}={ids!r}: expected a list of token ids")
    try:
        array("I", ids)  # the cheapest check of a thousand ids; it also accepts `True`, which no server sends
    except (TypeError, OverflowError):
        position, bad = next((k, i) for k, i in enumerate(ids) if not (isinstance(i, int) and 0 <= i < 2**32))
        raise TokenMismatchError(
            f"{field}[{position}]={bad!r}: a token id is a whole number from 0 to 4294967295"
        ) from None
    return ids


def _checked_logprobs(values: Any, field: str) -> list[float]:
    if not values:
        return []
    types = set(map(type, values))
    if not types <= {float, int}:
        position, bad = next((k, v) for k, v in enumerate(values) if type(v) not in (float, int))
        raise TokenMismatchError(f"{field}[{position}].logprob={bad!r}: expected a number")
    # The sum is infinite or NaN if any value is, and is the cheapest check that none is.
    if not (math.isfinite(sum(values)) and max(values) <= LOGPROB_TOLERANCE):
        for position, value in enumerate(values):
            if not -math.inf < value <= LOGPROB_TOLERANCE:
                raise TokenMismatchError(
                    f"{field}[{position}].logprob={value!r}: a log-probability is finite and at most 0"
                )
    return list(map(float, values)) if int in types else values


def _problem(prompt_ids: object, response_ids: object, logprobs: object, where: str) -> str | None:
    missing = [] if prompt_ids else ["prompt_token_ids"]  # every prompt has tokens
    if response_ids is None:
        missing.append(f"{where}.token_ids")
    remedies = ["return_token_ids: true (vLLM >= 0.10.2)"] if missing else []
    if logprobs is None:
        missing.append(f"{where}.logprobs.content")
        remedies.append("logprobs: true")
    if missing:
        return (
            f"the server's chat completion (OpenAI format) lacks {' and '.join(missing)}: "
            f"send {' and '.join(remedies)} to a server that honours it; other calls can be evaluated, not trained on"
        )
    if not response_ids:
        return f"{where} has no sampled tokens"
    return None


def _start_of(values: object) -> str:
    """Return the first few values, short enough for an error message."""
    if not isinstance(values, list):
        return repr(values)[:80]
    return repr(values[:4])[:160] if len(values) <= 4 else f"{repr(values[:4])[:-1][:160]}, ...]"
