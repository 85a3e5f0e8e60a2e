"""Failed rollouts: which ones are retried, their episodes, and counts of their reasons."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rllm.engine.request import RolloutRequest
from rllm.engine.validation import has_form
from rllm.errors import PromptTooLongError, RolloutError, RolloutTimeout, traceback_of
from rllm.types import SOURCE_KEY, Episode, TerminationReason

_VARYING = re.compile(
    r"""
    (?:(?<=\breturned\ )|(?<=\bfor\ task\ ))(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")     # model output, ids of tasks
    | 0x[0-9a-fA-F]+                                      # addresses
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b   # UUIDs
    | \b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b               # hexadecimal ids
    | \d+(?:\.\d+)*(?:[eE][+-]?\d+)?                      # numbers, addresses of hosts
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One kind of failure, and the number of rollouts that it affected."""

    text: str
    """First message, as an example if the messages differ."""
    count: int
    num_variants: int = 1
    """Number of different messages, which differ only in ids, numbers or returned text."""

    def __str__(self) -> str:
        others = (
            f" (and {self.num_variants - 1} that differ only in ids, numbers or returned text)"
            if self.num_variants > 1
            else ""
        )
        return f"{self.count} x {self.text}{others}"


def why_failed(episode: Episode) -> str | None:
    """Return `"ErrorType: message"` of a failed rollout, without its session id; `None` if it did not fail."""
    if not episode.failed:
        return None
    error = episode.info["error"]
    text = f"{error['type']}: {error['message']}"
    return text.replace(episode.session_id, "...") if episode.session_id else text


def why_unscored(episode: Episode) -> str | None:
    """Return the reason why a rollout has no reward; `None` if it has one, or failed."""
    if episode.failed or episode.is_correct or any(path.final_reward() is not None for path in episode.trajectories):
        return None
    return str(episode.info.get("unscored") or "it has no reward")


def count_reasons(messages: Iterable[str]) -> list[Reason]:
    """Group messages that differ only in ids, numbers or returned text, most frequent first."""
    by_kind: dict[str, Counter[str]] = {}
    for message in messages:
        by_kind.setdefault(_VARYING.sub("#", message), Counter())[message] += 1
    reasons = [
        Reason(text=next(iter(variants)), count=variants.total(), num_variants=len(variants))
        for variants in by_kind.values()
    ]
    return sorted(reasons, key=lambda reason: -reason.count)


_DISCONNECTED = ("RemoteProtocolError", "ServerDisconnectedError")
"""Errors of httpx and aiohttp for a server that closed the connection early; no socket error causes them."""


def is_transient(error: RolloutError) -> bool:
    """Return whether a retry may succeed: a server failed (5xx, 429) or could not be reached.

    A timeout is not transient: a retry of a stuck rollout would double its cost.
    """
    return any(_is_server_failure(item) for item in (error, error.__cause__) if item is not None)


def _is_server_failure(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status == 429
    # Clients wrap the error of the socket, each in a class of its own; only some derive from ConnectionError.
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, ConnectionError | socket.gaierror) or type(cause).__name__ in _DISCONNECTED:
            return True
        if isinstance(getattr(cause, "reason", None), ConnectionError | socket.gaierror):  # of urllib
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


_REASONS: dict[type[RolloutError], TerminationReason] = {
    RolloutTimeout: TerminationReason.TIMEOUT,
    PromptTooLongError: TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
}


def failed_episode(attempt: RolloutRequest, error: RolloutError) -> Episode:
    """Return the record of an attempt that failed; it counts as incorrect."""
    return Episode(
        task=attempt.task,
        task_id=attempt.task_id,
        index=attempt.index,
        session_id=attempt.session_id,
        termination_reason=next(
            (reason for kind, reason in _REASONS.items() if isinstance(error, kind)), TerminationReason.ERROR
        ),
        is_correct=False,
        trajectories=list(filter(has_form, attempt.trajectories)),
        info={**({} if attempt.source is None else {SOURCE_KEY: attempt.source}), "error": error_record(error)},
    )


def error_record(error: RolloutError) -> dict[str, str]:
    """Return the value of `Episode.info["error"]`; its traceback is empty if the message has the whole reason."""
    return {"type": type(error).__name__, "message": str(error), "traceback": traceback_of(error)}
