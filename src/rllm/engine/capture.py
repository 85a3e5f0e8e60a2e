"""Recording of a rollout's model calls, and reading them back when it has ended.

`Capture` sees calls made through a `RecordingEngine`. `GatewayCapture` also sees those that arrive over HTTP,
from any client, and finds all of them in the store. `RemoteGateway` is a gateway on another machine, reached over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias, TypeVar
from urllib.parse import quote

from rllm._runtime.threads import in_thread
from rllm.engine.recording_engine import RecordingEngine, check_one_answer, imposed
from rllm.engine.request import RolloutRequest
from rllm.errors import ConfigError, InferenceError
from rllm.gateway.sessions import unattributed_session
from rllm.inference.engine import ModelOutput
from rllm.inference.servers.control import ServerClient
from rllm.sdk.context import Session
from rllm.sdk.propagation import installed
from rllm.sdk.variables import led_to
from rllm.types import SOURCE_KEY, JSONMapping, JSONObject, Message, Trace

if TYPE_CHECKING:
    from rllm.gateway.server import GatewayServer
    from rllm.store.base import TraceStore

SessionGateway: TypeAlias = "GatewayServer | RemoteGateway"
T = TypeVar("T")

_FEW_CALLS = 8
"""A session of at most this many calls is read from a local store faster than a thread starts."""
LATE_TRACE_S = 2.0
"""Seconds to wait for the trace of a call that the agent names; a stream that it left early is stored late."""


class Capture:
    """Keeps the calls of an engine's attempts in memory while each attempt runs; used inside `with capture:`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    @asynccontextmanager
    async def session(self, attempt: RolloutRequest) -> AsyncIterator[Session]:
        """Record model calls inside under the attempt, with its sampling parameters."""
        with imposed(attempt.sampling), Session(name=attempt.session_id) as session:
            yield session

    async def traces(self, session: Session, awaited: set[str]) -> list[Trace]:
        """Return the calls of a session that has ended, in the order of their start.

        Args:
            session: the session.
            awaited: ids of calls to wait for, in case their traces are stored late.
        """
        return session.llm_calls


class GatewayCapture(Capture):
    """Sends model clients of this process to the gateway, and reads their calls from the store behind it."""

    def __init__(self, gateway: SessionGateway, store: TraceStore | RemoteGateway) -> None:
        self.gateway = gateway
        self.store = store
        self._changes = ExitStack()
        """Changes to undo when the last user leaves."""
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
    async def session(self, attempt: RolloutRequest) -> AsyncIterator[Session]:
        if not self._num_inside:
            raise ConfigError("the engine is not running: use it inside `with engine:`")
        base_url = await _asked(partial(self._open_session, attempt), "rllm open session", at_once=self.store.is_local)
        with imposed(attempt.sampling), Session(name=attempt.session_id, base_url=base_url) as session:
            yield session

    def _open_session(self, attempt: RolloutRequest) -> str:
        metadata: JSONObject = {"task_id": attempt.task_id, "index": attempt.index, "split": attempt.split}
        if attempt.training_step is not None:
            metadata["training_step"] = attempt.training_step
        if attempt.source is not None:
            metadata[SOURCE_KEY] = attempt.source
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

    async def unattributed(self, attempt: RolloutRequest, since: float) -> list[Trace]:
        """Return the calls that have named no session since this Unix time; any of them may be the attempt's."""
        read = partial(self.store.by_session, unattributed_session(attempt.run_id))
        traces = await _asked(read, "rllm read session", at_once=self.store.is_local)
        return [trace for trace in traces if trace.started_at >= since]


async def _asked(question: Callable[[], T], name: str, *, at_once: bool) -> T:
    """Ask the gateway or the store, in a thread unless the answer is immediate: then a thread would cost far more."""
    return question() if at_once else await in_thread(question, name=name)


@dataclass(frozen=True, kw_only=True)
class RemoteGateway:
    """A gateway in another process, and the traces of its store, over HTTP."""

    is_local: ClassVar[bool] = False
    """False, because answers come over the network."""
    url: str
    """`http://host:port`."""
    api_key: str | None
    """The gateway's own key, if it has one."""

    @property
    def process_key(self) -> str | None:
        """Key for calls of this process that belong to no session."""
        from rllm.gateway.identity import unnamed_key

        return None if self.api_key is None else unnamed_key(self.api_key)

    def open_session(
        self,
        session_id: str,
        *,
        metadata: JSONMapping | None = None,
        sampling: JSONMapping | None = None,
    ) -> str:
        """Open a session and return the base URL of its calls; raise `InferenceError` if the gateway refuses."""
        return self.open_session_with_key(session_id, metadata=metadata, sampling=sampling)[0]

    def open_session_with_key(
        self,
        session_id: str,
        *,
        metadata: JSONMapping | None = None,
        sampling: JSONMapping | None = None,
    ) -> tuple[str, str | None]:
        """Open a session; also return a key that is valid for this session only, if the gateway has keys.

        Raises:
            InferenceError: if the gateway cannot be reached, or refuses.
        """
        wanted = {"id": session_id, "metadata": dict(metadata or {}), "sampling": sampling and dict(sampling)}
        answer = self._answer_in(self._client.post("/sessions", wanted))
        return f"{self.url}/sessions/{quote(session_id, safe='')}/v1", answer.get("api_key")

    def by_session(self, session_id: str) -> list[Trace]:
        """Return the calls of a session, none if it was not opened; raise `InferenceError` if the gateway refuses."""
        try:
            answer = self._client.get(f"/sessions/{quote(session_id, safe='')}/traces")
        except InferenceError as error:
            if error.status_code != 404:
                raise
            return []
        return [Trace.from_dict(trace) for trace in self._answer_in(answer)["traces"]]

    def check(self) -> None:
        """Check that the gateway answers; raise `InferenceError` if it does not."""
        self._answer_in(self._client.get("/healthz"))

    def _answer_in(self, answer: object) -> JSONObject:
        if not isinstance(answer, dict):
            raise InferenceError(
                f"{self.url} did not answer with JSON, so it is not a gateway: {answer!r:.200}; check that there is no "
                "proxy between the nodes and the trainer"
            )
        return answer

    @property
    def _client(self) -> ServerClient:
        return ServerClient(self.url, api_key=self.api_key)


class GatewayEngine(RecordingEngine):
    """Engine for the policy behind a remote gateway, which records calls and imposes the sampling.

    A call belongs to the session that it is made in, inside a `GatewayCapture`, or to none.
    """

    def __init__(self, gateway: RemoteGateway, *, model: str = "policy") -> None:
        from rllm.inference.openai_engine import OpenAIEngine

        super().__init__(OpenAIEngine(model, base_url=f"{gateway.url}/v1", api_key=gateway.api_key), model=model)

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: object
    ) -> ModelOutput:
        """Return one answer, with the `id` of its trace at the gateway.

        Raises:
            ConfigError: if several answers are requested at once.
            InferenceError: if the gateway returns an error.
        """
        check_one_answer(params)
        return await self.inference.get_model_response(messages, tools=tools, **params)
