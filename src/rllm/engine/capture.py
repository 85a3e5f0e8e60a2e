"""Where an attempt's model calls are kept while it runs, and read back from when it has ended.

`InProcessCapture` knows the calls that are made through a `RecordedEngine`. `GatewayCapture` also takes those that arrive
over HTTP, from any client, and finds all of them in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from rllm._runtime.threads import in_thread
from rllm.engine.recorded import imposed
from rllm.engine.runner import Attempt
from rllm.errors import ConfigError
from rllm.gateway.sessions import unattributed_session
from rllm.sdk.context import Session
from rllm.sdk.propagation import installed
from rllm.sdk.variables import led_to
from rllm.types import Trace

T = TypeVar("T")

_FEW_CALLS = 8
"""A session of no more is read from a local store sooner than a thread begins to; the calls of a long one take milliseconds."""
LATE_TRACE_S = 2.0
"""How long to wait for the trace of a call that the agent names: one whose stream it left early is stored afterwards."""


class Capture(Protocol):
    """How an engine learns of the calls of its attempts. It works inside `with capture:`."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...

    def session(self, attempt: Attempt) -> AbstractAsyncContextManager[Session]:
        """Inside, model calls are filed under the attempt, with the sampling parameters that it imposes."""
        ...

    async def traces(self, session: Session, awaited: set[str]) -> list[Trace]:
        """The calls of a session that has ended, in the order in which they began.

        Args:
            session: the session.
            awaited: ids that must be there, if they ever come: they are waited for.
        """
        ...


class InProcessCapture:
    """Keeps calls in memory, for as long as the attempt takes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    @asynccontextmanager
    async def session(self, attempt: Attempt) -> AsyncIterator[Session]:
        with imposed(attempt.sampling), Session(name=attempt.session_id) as session:
            yield session

    async def traces(self, session: Session, awaited: set[str]) -> list[Trace]:
        return session.llm_calls


class SessionGateway(Protocol):
    """What is needed of a gateway."""

    @property
    def url(self) -> str:
        """`http://host:port`."""
        ...

    @property
    def process_key(self) -> str | None:
        """Key for calls of this process that belong to no session, if the gateway needs one."""
        ...

    def open_session(
        self,
        session_id: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> str:
        """Begin a session; returns the base URL of its calls."""
        ...


class SessionTraces(Protocol):
    """What is needed of a store."""

    @property
    def is_local(self) -> bool:
        """Whether it answers within microseconds, and so the gateway before it, so that an event loop may wait for either."""
        ...

    def by_session(self, session_id: str) -> list[Trace]:
        """The calls of a session, in the order in which they were stored."""
        ...


class GatewayCapture:
    """Leads model clients of this process to the gateway, and reads what they did from the store behind it."""

    def __init__(self, gateway: SessionGateway, store: SessionTraces) -> None:
        self.gateway = gateway
        self.store = store
        self._changes = ExitStack()
        """What to undo when the last one leaves."""
        self._num_inside = 0

    def __enter__(self) -> Self:
        if self._num_inside == 0:
            self._changes.enter_context(installed())
            self._changes.enter_context(led_to(self.gateway.url, api_key=self.gateway.process_key))
        self._num_inside += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._num_inside = max(self._num_inside - 1, 0)
        if self._num_inside == 0:
            self._changes.close()

    @asynccontextmanager
    async def session(self, attempt: Attempt) -> AsyncIterator[Session]:
        if not self._num_inside:
            raise ConfigError("the engine is not running: use it inside `with engine:`")
        base_url = await _asked(partial(self._open_session, attempt), "rllm open session", at_once=self.store.is_local)
        with imposed(attempt.sampling), Session(name=attempt.session_id, base_url=base_url) as session:
            yield session

    def _open_session(self, attempt: Attempt) -> str:
        metadata: dict[str, Any] = {"task_id": attempt.task_id, "index": attempt.index, "split": attempt.split}
        if attempt.training_step is not None:
            metadata["training_step"] = attempt.training_step
        if attempt.run_id is not None:
            metadata["run_id"] = attempt.run_id
        return self.gateway.open_session(attempt.session_id, metadata=metadata, sampling=attempt.sampling or None)

    async def traces(self, session: Session, awaited: set[str]) -> list[Trace]:
        deadline = asyncio.get_running_loop().time() + LATE_TRACE_S
        at_once = self.store.is_local and 0 < session.num_begun <= _FEW_CALLS
        while True:
            traces = await _asked(partial(self.store.by_session, session.name), "rllm read session", at_once=at_once)
            late = awaited - {trace.id for trace in traces}
            complete = not late and (traces or session.num_begun == 0)
            if complete or asyncio.get_running_loop().time() > deadline:
                return sorted(traces, key=lambda trace: trace.started_at)
            await asyncio.sleep(0.05)

    async def unattributed(self, attempt: Attempt, since: float) -> list[Trace]:
        """Return the calls that have named no session since this Unix time; any of them may be those of the attempt."""
        read = partial(self.store.by_session, unattributed_session(attempt.run_id))
        traces = await _asked(read, "rllm read session", at_once=self.store.is_local)
        return [trace for trace in traces if trace.started_at >= since]


async def _asked(question: Callable[[], T], name: str, *, at_once: bool) -> T:
    """What gateway or store answer. To have a thread ask what is answered at once costs several times that."""
    return question() if at_once else await in_thread(question, name=name)
