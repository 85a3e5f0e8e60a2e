"""Sessions of the gateway: sampling imposed on their calls, the calls they continue, and calls that name no session."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from rllm.capture import SAMPLING_FIELDS, CallNode, Conversations, MessageDigests
from rllm.config.sampling import ImposedSampling
from rllm.errors import ConfigError
from rllm.gateway.config import SESSION_MEMORY_GB
from rllm.gateway.dialects.base import problem_of_n
from rllm.gateway.errors import GatewayError
from rllm.inference.engine import SamplingParams
from rllm.registry import did_you_mean
from rllm.store.base import SessionRef, TraceStore
from rllm.telemetry import outgoing_headers
from rllm.types import CLIENT_KEY, RESERVED_PREFIX, JSONMapping, JSONObject, Trace

logger = logging.getLogger(__name__)

SAMPLING_KEY = "rllm.sampling"
"""Metadata key of a session: its imposed sampling parameters, so that they survive a restart of the gateway."""
TRACE_CONTEXT_KEY = "rllm.trace_context"
"""Metadata key of a session: the W3C headers of the span in which it was opened."""

_VALID_ID = re.compile(r"(?!\.{1,2}\Z)[^\s/\x00-\x1f\x7f\ud800-\udfff\ufffd]{1,256}")
"""Ids without `.` and `..`, which clients and proxies resolve, and without U+FFFD, which replaces any invalid UTF-8."""
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
"""Invisible characters that Unicode counts as letters, marks and symbols."""
_MAX_IN_MEMORY = 10_000
_ALWAYS_IN_MEMORY = 1
"""Number of latest sessions kept in memory at any size: reading a long one for each call would be slower each time."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class SessionState:
    """State of a session in memory; all of it can be read back from the store."""

    id: str
    sampling: ImposedSampling = field(default_factory=ImposedSampling)
    is_single: bool = False
    """True if it has one call, which nothing continues."""
    conversations: Conversations = field(default_factory=Conversations)
    """Its calls by tokens and by messages."""
    has_tools: bool = False
    """True if any of its calls had tools."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """W3C headers of the span in which it was opened, for calls without their own; empty without telemetry."""
    ref: SessionRef = field(default_factory=SessionRef)
    """Its identity in the store, so that nothing is added to a later session of its name."""
    deleted: bool = False
    """True if it was deleted. Its calls are no longer stored: another session may have its name."""
    num_counted_bytes: int = 0
    """Bytes that it contributes to the size of all kept sessions."""

    @property
    def num_bytes(self) -> int:
        """Approximate size of its calls in memory."""
        return self.conversations.num_bytes + self.conversations.parents.num_bytes


class Sessions:
    """Sessions of a gateway, each an object shared by its calls.

    A session is

    - *begun* once it was opened or called: it is known, or is read from the store;
    - *kept* in memory while it is among those used last: at most 10,000, and at most `memory_gb`, except for the very
      last;
    - *known* while anything refers to it, if only a running call: there are never two of one name;
    - *deleted* from the request to delete it: its running calls end with an error.

    A deleted session is known until it is out of the store. Then it is forgotten, and another may begin under its name.
    One that another process deleted is forgotten once the store refuses a write of it.
    """

    def __init__(self, store: TraceStore, *, memory_gb: float = SESSION_MEMORY_GB) -> None:
        self._store = store
        self._max_bytes = memory_gb * 1e9
        self._num_bytes = 0
        self._kept: OrderedDict[str, SessionState] = OrderedDict()
        self._lock = threading.Lock()
        """Guards `_kept` and `_num_bytes`."""
        self._known: WeakValueDictionary[str, SessionState] = WeakValueDictionary()
        self._num_deletions = 0
        self._unnamed: OrderedDict[str, str] = OrderedDict()
        """Sessions of answers whose calls named none, by the answer's id."""
        self.unattributed = UnattributedCalls()

    def fresh(self) -> SessionState:
        """Return a session for a call that names none: during rollouts one for all such calls, otherwise a new one.

        Nothing continues it, so it is not kept in memory.
        """
        return SessionState(self.unattributed.session_id or new_session_id(), is_single=True)

    async def get(self, session_id: str) -> SessionState:
        """Return the session with an id, new or existing.

        Raises:
            ConfigError: if the id cannot stand in a URL path.
            GatewayError: 410, if it is being deleted.
        """
        session = self._current(session_id)
        while session is None:
            check_session_id(session_id)
            num_deletions = self._num_deletions
            found = await self._read(session_id)
            if num_deletions == self._num_deletions:  # Otherwise it may have been read before its deletion.
                session = self._know(found)
        check_not_deleted(session)
        return session

    def open(self, session_id: str, *, metadata: JSONMapping | None, sampling: JSONMapping | None) -> Future[None]:
        """Begin a session, or add to one; return a future that completes once other gateways can read it.

        Its row precedes its first trace in the store, because writes keep their order.

        Raises:
            ConfigError: if the id cannot stand in a URL path, a metadata key is reserved, or a sampling parameter is
                unknown or out of range.
            GatewayError: 410, if it is being deleted.
        """
        check_session_id(session_id)
        for name in metadata or {}:
            if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
                raise ConfigError(
                    f"session metadata {name!r}: names that begin with {RESERVED_PREFIX!r} are reserved: choose another"
                )
        self.unattributed.expect_sessions(metadata or {})
        session = self._current(session_id)
        if session is not None:
            check_not_deleted(session)
            info = None if session.ref.number is None else self._store.session(session_id)
            if session.ref.number is not None and (info is None or info.number != session.ref.number):
                session.ref.is_gone = True
                session = self._current(session_id)
        fixed = check_sampling(sampling) if sampling is not None else None
        stored = {**(metadata or {}), SAMPLING_KEY: fixed} if fixed is not None else dict(metadata or {})
        ref = SessionRef() if session is None else session.ref
        if trace_context := outgoing_headers():
            stored[TRACE_CONTEXT_KEY] = trace_context
        write = self._store.open_session(session_id, stored, session=ref)
        if session is None:
            is_old = self._store.session(session_id) is not None
            session = self._know(self._load(session_id) if is_old else SessionState(session_id, ref=ref))
        write.add_done_callback(lambda _: session)  # Keep it known until it can be read.
        if fixed is not None:
            session.sampling.parameters = fixed
        session.trace_context = trace_context or session.trace_context
        return write

    def update_size(self, session: SessionState) -> None:
        """Update the counted size of a session after a call; drop the least recently used ones above the limit.

        Dropped sessions are read from the store again when they continue.
        """
        with self._lock:
            if self._known.get(session.id) is session:
                self._keep(session)

    def knows(self, session_id: str) -> bool:
        """Return whether the session is known."""
        return session_id in self._known

    async def has_begun(self, session_id: str) -> bool:
        """Return whether the session has begun."""
        if self._current(session_id) is not None:
            return True
        return await asyncio.to_thread(self._store.session, session_id) is not None

    async def number_of(self, session_id: str) -> int | None:
        """Return the store's number of the session of this name, or `None` if there is none."""
        session = self._current(session_id)
        if session is not None and session.ref.number is not None:
            return session.ref.number
        info = await asyncio.to_thread(self._store.session, session_id)
        return None if info is None else info.number

    def remember_answer(self, answer_id: str, session_id: str) -> None:
        """Remember the session of an answer, for a client that continues it by the answer's id alone.

        Only the latest answers are remembered, and only in this process; named sessions have neither limit.
        """
        self._unnamed[answer_id] = session_id
        if len(self._unnamed) > _MAX_IN_MEMORY:
            self._unnamed.popitem(last=False)

    def session_of_answer(self, answer_id: str) -> str | None:
        """Return the session of an answer whose call named none."""
        return self._unnamed.get(answer_id)

    async def delete(self, session_id: str) -> int:
        """Delete a session with its traces, and return their number. Its running calls end with an error.

        Its name may then be used by an unrelated session. If the store fails, the session remains.
        """
        known = self._known.get(session_id)
        ended = self._know(known or SessionState(session_id))
        ended.deleted = True  # It stays known until it is gone, so that new calls are refused.
        try:
            return await asyncio.to_thread(self._store.delete, session_id)
        except Exception:
            ended.deleted = False
            ended.ref.is_gone = ended.ref.number is not None  # The next use reads it from the store.
            raise
        finally:
            self._num_deletions += 1
            if ended.deleted or known is None:
                self._forget(ended)

    def _current(self, session_id: str) -> SessionState | None:
        """Return the session if it is known, unless a refused write showed that another process deleted it."""
        session = self._known.get(session_id)
        if session is not None and session.ref.is_gone and not session.deleted:
            session.deleted = True
            self._forget(session)
            return None
        return session

    def _know(self, session: SessionState) -> SessionState:
        """Keep a session in memory; return it, or the one with its name if another is known by now."""
        with self._lock:
            session = self._known.setdefault(session.id, session)
            self._keep(session)
        return session

    def _keep(self, session: SessionState) -> None:
        """Update the counted size of a session, and drop others above the limit. Called under the lock."""
        self._kept[session.id] = session
        self._kept.move_to_end(session.id)
        num_bytes = session.num_bytes
        self._num_bytes += num_bytes - session.num_counted_bytes
        session.num_counted_bytes = num_bytes
        while len(self._kept) > _ALWAYS_IN_MEMORY and (
            len(self._kept) > _MAX_IN_MEMORY or self._num_bytes > self._max_bytes
        ):
            self._uncount(self._kept.popitem(last=False)[1])

    def _uncount(self, session: SessionState) -> None:
        self._num_bytes -= session.num_counted_bytes
        session.num_counted_bytes = 0

    def _forget(self, session: SessionState) -> None:
        """Forget a session, unless another one has its name by now."""
        with self._lock:
            for sessions in (self._kept, self._known):
                if sessions.get(session.id) is session:
                    sessions.pop(session.id, None)
            self._uncount(session)

    async def _read(self, session_id: str) -> SessionState:
        # Nearly every session is new, and asking a local store is faster than a thread.
        if self._store.is_local and self._store.session(session_id) is None:
            return SessionState(session_id)
        return await asyncio.to_thread(self._load, session_id)

    def _load(self, session_id: str) -> SessionState:
        session = SessionState(session_id)
        conversations = session.conversations
        info = self._store.session(session_id)
        if info is not None:
            session.ref.number = info.number
            session.sampling.parameters = dict(info.metadata.get(SAMPLING_KEY) or {})
            session.trace_context = dict(info.metadata.get(TRACE_CONTEXT_KEY) or {})
            calls: dict[str, Trace] = {}
            for trace in self._store.by_session(session_id):
                session.has_tools = session.has_tools or bool(trace.tools)
                conversations.parents.add(CallNode.of_trace(trace))
                if trace.error is None:
                    digests = MessageDigests.of(trace.messages, trace.tools, conversations)
                    conversations.add(conversations.prepare(digests, trace))
                calls.setdefault(trace.call_id, trace)
            if "seed" in session.sampling.parameters:
                for call in calls.values():
                    session.sampling.seeds.next(0, call.messages, call.tools, call.prompt_ids)
        return session


def new_session_id() -> str:
    """Return a random id that begins with its time, so that sessions sort by age."""
    return f"s-{int(time.time()):x}-{uuid.uuid4().hex}"


def is_session_id(text: str) -> bool:
    """Return whether a session can have this id."""
    is_valid = _VALID_ID.fullmatch(text) is not None
    # Other ids look like another one, or reverse the text next to them (U+202E and the like).
    return is_valid and (text.isascii() or (text.isprintable() and not _INVISIBLE.search(text)))


def check_session_id(session_id: str) -> None:
    """Raise `ConfigError` for an id that cannot stand in a URL path."""
    if not is_session_id(session_id):
        raise ConfigError(
            f"session id {session_id[:80]!r}: use 1 to 256 characters without white space, slashes, control "
            "and invisible characters, and neither '.' nor '..'"
        )


def check_not_deleted(session: SessionState) -> None:
    """Raise a `GatewayError`, 410, for a session that was deleted."""
    if session.deleted:
        raise GatewayError(
            410,
            f"the session {session.id!r} was deleted during this call, which is not stored",
            code="session_deleted",
        )


def check_sampling(parameters: JSONMapping) -> JSONObject:
    """Return the sampling parameters that a session imposes, without those that are `None`.

    Raises:
        ConfigError: if one is unknown, of the wrong type or out of range.
    """
    unknown = sorted(parameters.keys() - set(SAMPLING_FIELDS))
    if unknown:
        meant = did_you_mean(unknown[0], SAMPLING_FIELDS, "sampling") or f"use only {', '.join(SAMPLING_FIELDS)}"
        raise ConfigError(f"sampling.{unknown[0]}={parameters[unknown[0]]!r}: {meant}")
    if problem := problem_of_n(parameters.get("n")):
        raise ConfigError(f"sampling.{problem}")
    SamplingParams.from_request(parameters)
    return {name: value for name, value in parameters.items() if value is not None}


# --- calls without a session -----------------------------------------------------------------------------------------


def unattributed_session(run_id: str | None) -> str:
    """Return the id of the session that keeps the unattributed calls of a run."""
    return f"unattributed-{run_id}" if run_id else "unattributed"


class UnattributedCalls:
    """Calls that name no session while rollouts are running: stored together, counted, and logged once.

    Such a call comes from a process or a client without a session, and so belongs to no rollout, although it may have
    been made in one. Used only from the gateway's event loop, except `expect_sessions`.
    """

    def __init__(self) -> None:
        self.session_id: str | None = None
        """Session of these calls; `None` before the first rollout, when calls need no session."""
        self.num_calls = 0
        self._warned_of: str | None = None

    def expect_sessions(self, metadata: JSONMapping) -> None:
        """Record that a session was opened: once one of a rollout was, calls are expected to name a session."""
        if "split" in metadata:
            self.session_id = unattributed_session(metadata.get("run_id"))

    def note(self, scope: JSONMapping, headers: Mapping[bytes, bytes], *, is_refused: bool = False) -> JSONObject:
        """Count a call that names no session, and return the metadata to store with it, unless it is refused."""
        if self.session_id is None:
            return {}
        self.num_calls += 1
        agent = headers.get(b"user-agent", b"").decode("latin-1") or "an unnamed client"
        host = (scope.get("client") or ("",))[0]
        client = f"{agent} at {host}" if host else agent
        if self._warned_of != self.session_id:
            self._warned_of = self.session_id
            logger.warning(
                "a model call without a session arrived during rollouts, from %s: it belongs to no rollout and is not "
                "trained on. Such calls are %s and counted as dropped/unattributed_call. "
                "Pass the agent's base_url, or rllm.sdk.bind(function), to the process that makes them",
                client,
                "refused for lack of a key" if is_refused else f"stored in the session {self.session_id!r}",
            )
        return {CLIENT_KEY: client}
