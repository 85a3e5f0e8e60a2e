"""Sessions: whom a call belongs to, which sampling parameters are fixed for it, and what it continues."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from rllm.capture import SAMPLING_FIELDS, CallNode, Conversations, MessageDigests, ParentIndex
from rllm.config.sampling import ImposedSampling
from rllm.errors import ConfigError, StoreError
from rllm.gateway.config import SESSION_MEMORY_GB
from rllm.gateway.dialects.base import problem_of_n
from rllm.gateway.errors import GatewayError
from rllm.gateway.unattributed import Unattributed
from rllm.inference.engine import SamplingParams
from rllm.registry import did_you_mean
from rllm.store.base import SessionRef, TraceStore
from rllm.telemetry import outgoing_headers
from rllm.types import RESERVED_PREFIX, Trace

SAMPLING_KEY = "rllm.sampling"
"""Where a session's metadata keeps its fixed sampling parameters, so that a restarted gateway still obeys them."""
TRACE_CONTEXT_KEY = "rllm.trace_context"
"""Likewise, where it keeps in what span the session was opened."""

_VALID_ID = re.compile(r"(?!\.{1,2}\Z)[^\s/\x00-\x1f\x7f\ud800-\udfff\ufffd]{1,256}")
"""Clients and proxies resolve `.` and `..`; and U+FFFD stands for whatever is no UTF-8, so that several names would be one."""
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
"""Characters that show nothing although Unicode counts them as letters, marks and symbols."""
_MAX_IN_MEMORY = 10_000
_ALWAYS_IN_MEMORY = 1
"""So many of those used last stay, however much they hold: to read a long one for each of its calls takes longer each time."""
_TRUSTED_S = 5.0
"""How long a session is taken to be there still, after it was last looked for; what is written is checked in any case."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Session:
    """What the gateway keeps in memory about a session; all of it can be read back from the store."""

    id: str
    sampling: ImposedSampling = field(default_factory=ImposedSampling)
    parents: ParentIndex | None = field(default_factory=ParentIndex)
    """`None` for a session of one call."""
    conversations: Conversations | None = field(default_factory=Conversations)
    """Likewise."""
    has_tools: bool = False
    """Whether any of its calls had some."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """W3C headers of what the session was opened in, for calls that say nothing of their own; empty without telemetry."""
    ref: SessionRef = field(default_factory=SessionRef)
    """Which session of the store it is, so that nothing is added to a later one of its name."""
    looked_for_at: float = field(default_factory=time.monotonic)
    """When it was last known to be in the store, or to begin."""
    deleted: bool = False
    """Whether it was deleted. Nothing more is kept of its calls: another session may have its name by then."""
    num_counted_bytes: int = 0
    """How many of its bytes count among those of all kept sessions."""

    @property
    def num_bytes(self) -> int:
        """About what its calls take in memory."""
        return sum(part.num_bytes for part in (self.parents, self.conversations) if part is not None)

    @property
    def is_doubtful(self) -> bool:
        """Whether somebody else may have deleted it since it was last looked for."""
        is_old = self.ref.number is not None and time.monotonic() - self.looked_for_at > _TRUSTED_S
        return (is_old or self.ref.is_gone) and not self.deleted


@dataclass(eq=False, slots=True)
class _Reading:
    """A session that is being read from the store."""

    session_id: str
    is_outdated: bool = False
    """Whether it was deleted meanwhile, so that what is found may be gone."""


class Sessions:
    """The sessions of a gateway, each an object that is shared by its calls. One is

    - *begun*, once somebody has opened it or made a call: it is known, or in the store, from which it is read then;
    - *kept* in memory, while it is among those used last: at most 10,000, and at most so many bytes, but for the very last;
    - *known*, while anything holds it, also where calls under way alone do: there are never two of one name;
    - *doubtful*, if it was not looked for in the store for seconds, or was refused a write: somebody else may have deleted it;
    - *deleted*, from when we are asked to delete it, or find that somebody else has: its calls under way end with an error.

    One that is deleted is known until it is out of the store. Then it is forgotten, and another may begin under its name.
    """

    def __init__(self, store: TraceStore, *, memory_gb: float = SESSION_MEMORY_GB) -> None:
        self._store = store
        self._max_bytes = memory_gb * 1e9
        self._num_bytes = 0
        self._kept: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()
        """For what is kept, and how many bytes that is."""
        self._known: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._readings: set[_Reading] = set()
        self._unnamed: OrderedDict[str, str] = OrderedDict()
        """The sessions of answers whose calls named none, by the answer's id."""
        self.unattributed = Unattributed()

    def fresh(self) -> Session:
        """Return a session for a call that names none: during rollouts the one that keeps all of these, else a new one.
        Nothing continues it, so it is not kept in memory."""
        return Session(self.unattributed.session_id or new_session_id(), parents=None, conversations=None)

    async def get(self, session_id: str) -> Session:
        """The session of this id, whether or not it has been seen before.

        Raises:
            ConfigError: if the id cannot stand in a URL path.
            GatewayError: 410, if it is being deleted.
        """
        session = await self._still_known(session_id)
        while session is None:
            check_session_id(session_id)
            self._readings.add(reading := _Reading(session_id))
            try:
                found = await self._read(session_id)
            finally:
                self._readings.discard(reading)
            if not reading.is_outdated:
                session = self._know(found)
        check_not_deleted(session)
        with suppress(KeyError):  # another thread may just have let go of it
            self._kept.move_to_end(session_id)
        return session

    def open(
        self, session_id: str, *, metadata: Mapping[str, Any] | None, sampling: Mapping[str, Any] | None
    ) -> Future[None]:
        """Begin a session, or add to one. Its row precedes its first trace in the store: writes keep their order.

        Returns what ends once it is durable, and other gateways know of it.

        Raises:
            ConfigError: if the id cannot stand in a URL path, metadata use a name that is ours, or a sampling parameter is
                unknown or out of range.
            GatewayError: 410, if it is being deleted.
        """
        check_session_id(session_id)
        _check_metadata(metadata or {})
        self.unattributed.expect_sessions(metadata or {})
        session = self._known.get(session_id)
        if session is not None:
            check_not_deleted(session)
            session = session if self._is_there(session) else None
        fixed = check_sampling(sampling) if sampling is not None else None
        stored = {**(metadata or {}), SAMPLING_KEY: fixed} if fixed is not None else dict(metadata or {})
        ref = SessionRef() if session is None else session.ref
        if trace_context := outgoing_headers():
            stored[TRACE_CONTEXT_KEY] = trace_context
        write = self._store.open_session(session_id, stored, session=ref)
        if session is None:
            is_old = self._store.session(session_id) is not None
            session = self._know(self._load(session_id) if is_old else Session(session_id, ref=ref))
        write.add_done_callback(lambda _: session)  # which is known for as long as it cannot be read from the store
        if fixed is not None:
            session.sampling.parameters = fixed
        session.trace_context = trace_context or session.trace_context
        return write

    def weigh(self, session: Session) -> None:
        """Count what a call has added to its session. Where all together hold too much, those used longest ago are let go of;
        they are read from the store again when they go on."""
        with self._lock:
            if self._known.get(session.id) is session:
                self._keep(session)

    def knows(self, session_id: str) -> bool:
        """Whether the session is known."""
        return session_id in self._known

    async def has_begun(self, session_id: str) -> bool:
        """Whether somebody has begun this session."""
        return (
            await self._still_known(session_id) is not None
            or await asyncio.to_thread(self._store.session, session_id) is not None
        )

    async def number_of(self, session_id: str) -> int | None:
        """Return which session of this name is there, by its number in the store; `None` if there is none."""
        session = await self._still_known(session_id)
        if session is not None and session.ref.number is not None:
            return session.ref.number
        info = await asyncio.to_thread(self._store.session, session_id)
        return None if info is None else info.number

    def remember_answer(self, answer_id: str, session_id: str) -> None:
        """Keep in mind where an answer is, for a client that names nothing else when it continues.

        Only this process knows, and only of the latest answers: a session that is named outlives both.
        """
        self._unnamed[answer_id] = session_id
        if len(self._unnamed) > _MAX_IN_MEMORY:
            self._unnamed.popitem(last=False)

    def session_of_answer(self, answer_id: str) -> str | None:
        """The session of an answer whose call named none."""
        return self._unnamed.get(answer_id)

    async def delete(self, session_id: str) -> int:
        """Delete a session with its traces; returns how many there were. Its calls under way end with an error.

        Its name may be used again then, for a session that has nothing of this one. If the store fails, nothing has happened to
        it, but for calls that have ended meanwhile.
        """
        known = self._known.get(session_id)
        ended = self._know(known or Session(session_id))
        ended.deleted = True  # and stays known until it is gone, so that calls that come meanwhile hear of it
        try:
            return await asyncio.to_thread(self._store.delete, session_id)
        except Exception:
            ended.deleted = False
            ended.looked_for_at = -math.inf  # so that the store is asked before it is believed to be there
            raise
        finally:
            for reading in list(self._readings):
                reading.is_outdated = reading.is_outdated or reading.session_id == session_id
            if ended.deleted or known is None:
                self._forget(ended)

    async def _still_known(self, session_id: str) -> Session | None:
        """The session, if it is known and in the store still, as far as that is not doubtful."""
        session = self._known.get(session_id)
        if session is None or not session.is_doubtful:
            return session
        is_there = self._is_there(session) if self._store.is_local else await asyncio.to_thread(self._is_there, session)
        return session if is_there else self._known.get(session_id)

    def _is_there(self, session: Session) -> bool:
        """Look for the session in the store; one that somebody else has deleted, another gateway, the command line, or for its
        age, is forgotten."""
        if session.ref.number is None:
            return True
        with suppress(StoreError):  # if it cannot be asked now, what is written will tell
            info = self._store.session(session.id)
            session.looked_for_at = time.monotonic()
            session.ref.is_gone = info is None or info.number != session.ref.number
        if session.ref.is_gone:
            session.deleted = True
            self._forget(session)
        return not session.ref.is_gone

    def _know(self, session: Session) -> Session:
        """Keep a session in memory; returns it, or the one of its name that is known by now."""
        with self._lock:
            session = self._known.setdefault(session.id, session)
            self._keep(session)
        return session

    def _keep(self, session: Session) -> None:
        """Count what it holds now, and let go of others where that is too much. Under the lock."""
        self._kept[session.id] = session
        self._kept.move_to_end(session.id)
        num_bytes = session.num_bytes
        self._num_bytes += num_bytes - session.num_counted_bytes
        session.num_counted_bytes = num_bytes
        while len(self._kept) > _ALWAYS_IN_MEMORY and (
            len(self._kept) > _MAX_IN_MEMORY or self._num_bytes > self._max_bytes
        ):
            self._uncount(self._kept.popitem(last=False)[1])

    def _uncount(self, session: Session) -> None:
        self._num_bytes -= session.num_counted_bytes
        session.num_counted_bytes = 0

    def _forget(self, session: Session) -> None:
        """Leave its name to another session, which may have it by now."""
        with self._lock:
            for sessions in (self._kept, self._known):
                if sessions.get(session.id) is session:
                    sessions.pop(session.id, None)
            self._uncount(session)

    async def _read(self, session_id: str) -> Session:
        # Nearly every session is new. To hear that from a local store takes less than to have a thread ask it.
        if self._store.is_local and self._store.session(session_id) is None:
            return Session(session_id)
        return await asyncio.to_thread(self._load, session_id)

    def _load(self, session_id: str) -> Session:
        parents, conversations = ParentIndex(), Conversations()
        session = Session(session_id, parents=parents, conversations=conversations)
        info = self._store.session(session_id)
        if info is not None:
            session.ref.number = info.number
            session.sampling.parameters = dict(info.metadata.get(SAMPLING_KEY) or {})
            session.trace_context = dict(info.metadata.get(TRACE_CONTEXT_KEY) or {})
            calls: dict[str, Trace] = {}
            for trace in self._store.by_session(session_id):
                session.has_tools = session.has_tools or bool(trace.tools)
                parents.add(CallNode.of_trace(trace))
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
    # Others look like another id, or turn the order of what stands beside them (U+202E and its like).
    return is_valid and (text.isascii() or (text.isprintable() and not _INVISIBLE.search(text)))


def check_session_id(session_id: str) -> None:
    """Raise `ConfigError` for an id that cannot stand in a URL path."""
    if not is_session_id(session_id):
        raise ConfigError(
            f"session id {session_id[:80]!r}: use 1 to 256 characters without white space, slashes, control and invisible "
            "characters, and neither '.' nor '..'"
        )


def check_not_deleted(session: Session) -> None:
    """Raise a `GatewayError`, 410, for a session that was deleted."""
    if session.deleted:
        raise GatewayError(
            410,
            f"the session {session.id!r} was deleted while this call was under way: nothing of it is kept",
            code="session_deleted",
        )


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    for name in metadata:
        if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
            raise ConfigError(
                f"session metadata {name!r}: names that begin with {RESERVED_PREFIX!r} are the gateway's own: choose another"
            )


def check_sampling(parameters: Mapping[str, Any]) -> dict[str, Any]:
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
