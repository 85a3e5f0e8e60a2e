"""A gateway on another machine, as rollouts there know it: sessions are begun, asked and read over HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import orjson

from rllm.engine.recorded import RecordedEngine, check_one_answer
from rllm.errors import InferenceError
from rllm.inference.engine import ModelOutput
from rllm.types import Message, Trace

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RemoteGateway:
    """A `SessionGateway`, and of its store as much as rollouts need: the traces of a session."""

    is_local: ClassVar[bool] = False
    """Each answer comes over the network."""
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
        metadata: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> str:
        """Begin a session; returns the base URL of its calls.

        Raises:
            InferenceError: if the gateway cannot be reached, or refuses.
        """
        return self.open_session_with_key(session_id, metadata=metadata, sampling=sampling)[0]

    def open_session_with_key(
        self,
        session_id: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> tuple[str, str | None]:
        """As `open_session`; with a key that is good for this session only, if the gateway has keys.

        Raises:
            InferenceError: if the gateway cannot be reached, or refuses.
        """
        wanted = {"id": session_id, "metadata": dict(metadata or {}), "sampling": sampling and dict(sampling)}
        answer = self._ask("POST", "/sessions", orjson.dumps(wanted))
        return f"{self.url}/sessions/{quote(session_id, safe='')}/v1", answer.get("api_key")

    def by_session(self, session_id: str) -> list[Trace]:
        """Return the calls of a session, none for one that has not begun.

        Raises:
            InferenceError: if the gateway cannot be reached, or refuses.
        """
        try:
            answer = self._ask("GET", f"/sessions/{quote(session_id, safe='')}/traces")
        except InferenceError as error:
            if error.status_code != 404:
                raise
            return []
        return [Trace.from_dict(trace) for trace in answer["traces"]]

    def check(self) -> None:
        """
        Raises:
            InferenceError: if nobody answers.
        """
        self._ask("GET", "/healthz")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        address = urlsplit(self.url)
        secure = address.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connect(address.hostname or "", address.port, timeout=TIMEOUT_S)
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key is not None else {}
        try:
            connection.request(method, address.path + path, body, {"content-type": "application/json", **key})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise InferenceError(f"the gateway {self.url} cannot be reached ({error})", status_code=503) from error
        finally:
            connection.close()
        if response.status >= 300:
            raise InferenceError(
                f"the gateway {self.url} answered {response.status} to {method} {path}: {_start_of(answer)}",
                status_code=response.status,
            )
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise InferenceError(
                f"{self.url} answered no JSON to {method} {path}, so it is no gateway of ours: {_start_of(answer)}; see that nothing, "
                "such as a proxy, stands between the nodes and the trainer"
            ) from error


def _start_of(answer: bytes) -> str:
    return answer[:200].decode(errors="replace")


class GatewayEngine(RecordedEngine):
    """The policy behind a remote gateway, for agents that ask an engine: the gateway records, and imposes the sampling.

    A call belongs to the session that it is made in, inside of a `GatewayCapture`; outside of any it is filed under none.
    """

    def __init__(self, gateway: RemoteGateway, *, model: str = "policy") -> None:
        from rllm.inference.openai_engine import OpenAIEngine

        super().__init__(OpenAIEngine(model, base_url=f"{gateway.url}/v1", api_key=gateway.api_key), model=model)

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> ModelOutput:
        """One answer, whose `id` is that of its trace at the gateway.

        Raises:
            ConfigError: if several answers are asked for at once.
            InferenceError: what the gateway answers, if it has no answer.
        """
        check_one_answer(params)
        return await self.inference.get_model_response(messages, tools=tools, **params)
