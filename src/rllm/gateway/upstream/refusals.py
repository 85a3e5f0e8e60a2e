"""What an upstream's HTTP answer says: its JSON object, or its error, however that is written, as one of ours."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from rllm._runtime.untrusted import LARGE, TooLargeError, parse_json
from rllm.gateway.errors import CONTEXT_OVERFLOW, UpstreamError

_TOO_LONG = re.compile(r"context (?:length|window|size)|prompt is too long|max_new_tokens", re.IGNORECASE)
"""How vLLM, SGLang, llama.cpp, TGI and the providers speak of a prompt that is too long."""
_BUSY = (429, 502, 503, 504)
"""What servers, and proxies before them, answer while they cannot do what was asked."""
_DAY_S = 86_400.0
MAX_ANSWER_VALUE_BYTES = 512 * 1024 * 1024
"""See `check_values`: more than the longest answer takes with an entry for every token."""
_FOR_GOOD = ("insufficient_quota", "billing_hard_limit_reached")
"""Codes that come with status 429 and that no waiting helps against."""


def json_object(status: int, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """The body of a successful answer.

    Raises:
        UpstreamError: if the status says otherwise, or if it is not a JSON object.
    """
    if status != 200:
        raise refusal_of(status, body, headers)
    try:
        answer = parse_json(body, limit=MAX_ANSWER_VALUE_BYTES)
    except TooLargeError as error:
        raise UpstreamError(f"the upstream's answer cannot be read: {error}") from error
    except ValueError as error:
        raise UpstreamError(f"the upstream's answer is not JSON ({error}); it begins with {start_of(body)}") from error
    if not isinstance(answer, dict):
        raise UpstreamError(f"the upstream's answer is not a JSON object; it begins with {start_of(body)}")
    return answer


def without_error(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These answers or chunks; raises `UpstreamError` if one of them is an error that the upstream reports in their place."""
    for answer in answers:
        if error := answer.get("error"):
            raise _reported(error, 502)
    return answers


def refusal_of(status: int, body: bytes, headers: Mapping[str, str]) -> UpstreamError:
    """The upstream's error answer; a redirect, or a status that HTTP does not know, becomes 502: no agent can act on it."""
    try:
        answer = orjson.loads(body) if len(body) < LARGE else None
    except ValueError:
        answer = None
    shown = status if 400 <= status < 600 else 502
    if isinstance(answer, dict) and (error := _error_in(answer)):
        refusal = _reported(error, shown)
    else:
        refusal = UpstreamError(f"the upstream answered with status {status} and {start_of(body)}", status_code=shown)
    if status in _BUSY and refusal.details.get("code") not in _FOR_GOOD:
        refusal.fault, refusal.retry_after_s = "refused", _retry_after_s(headers.get("retry-after"))
    return refusal


def _error_in(answer: dict[str, Any]) -> Any:
    """What a refusal says, under OpenAI's name or FastAPI's; SGLang's is all of the answer."""
    return answer.get("error") or answer.get("detail") or (answer if answer.get("object") == "error" else None)


def _retry_after_s(header: str | None) -> float | None:
    """The `Retry-After` header in seconds, which may be a number of them or a date (RFC 9110, section 10.2.3); a day at most."""
    if header is None:
        return None
    try:
        seconds = float(header) if header.isdecimal() else parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return None
    return min(max(seconds, 0.0), _DAY_S)


def _reported(error: Any, status: int) -> UpstreamError:
    """An OpenAI error object as an exception; a too long prompt gets the code by which clients recognise it."""
    details = dict(error) if isinstance(error, dict) else {"message": str(error)}
    message = str(details.get("message") or error)
    if status in (400, 413, 422) and (details.get("param") == "input_tokens" or _TOO_LONG.search(message)):
        details["code"] = CONTEXT_OVERFLOW
    return UpstreamError(message, status_code=status, details=details)


def start_of(body: bytes) -> str:
    """The beginning of a body, for an error message."""
    return repr(body[:120].decode(errors="replace"))
