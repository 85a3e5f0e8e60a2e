"""A gateway in front of a scripted model, for tests of agents that speak HTTP, in any framework.

with scripted_gateway(["The answer is 42."]) as gateway:
    client = openai.OpenAI(base_url=gateway.base_url, api_key="unused")
    ...
    assert gateway.traces()[0].messages == [...]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.sdk.variables import gateway_variables
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import Script, ScriptedEngine
from rllm.types import Episode, JSONMapping, Trace

SESSION = "test"


class ScriptedGateway:
    """A running gateway with a scripted model; created by `scripted_gateway`."""

    def __init__(self, engine: ScriptedEngine, server: GatewayServer, store: MemoryTraceStore) -> None:
        self.engine = engine
        self.url = server.url
        """`http://host:port`; each call to `{url}/v1` gets a session of its own."""
        self.base_url = server.open_session(SESSION)
        """URL of the session "test", including `/v1`. Anthropic's clients need it without `/v1`."""
        self._server = server
        self._store = store

    def open_session(self, session_id: str, *, sampling: JSONMapping | None = None) -> str:
        """Return the base URL of another session; `sampling` is imposed on its calls, as in training."""
        return self._server.open_session(session_id, sampling=sampling)

    def environment(self, base_url: str | None = None) -> dict[str, str]:
        """Return environment variables that lead a program's calls to this session."""
        return gateway_variables(base_url or self.base_url)

    def traces(self, session_id: str = SESSION) -> list[Trace]:
        """Return the calls of a session, in the order in which they began."""
        return sorted(self._store.by_session(session_id), key=lambda trace: trace.started_at)

    def rollout(self, agent: Callable[..., object], task: JSONMapping | None = None) -> Episode:
        """Run an agent function on a task, as `rllm train` would, and return the episode.

        Raises:
            RolloutError: if it fails; in training the error would be recorded.
        """
        return asyncio.run(self.rollout_async(agent, task))

    async def rollout_async(self, agent: Callable[..., object], task: JSONMapping | None = None) -> Episode:
        """Run an agent function like `rollout`; several may run at once."""
        with AgentFunctionEngine(agent, gateway=self._server, store=self._store) as engine:
            return await engine.rollout(RolloutRequest(task=dict(task or {}), task_id=SESSION))


@contextmanager
def scripted_gateway(script: Script | ScriptedEngine) -> Iterator[ScriptedGateway]:
    """Start a gateway whose model follows a script, on a free port of this machine, until the block ends.

    Args:
        script: Answers in the order of the calls, a function of the messages (see `rllm.testing.scripted`), or an
            engine.
    """
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    store = MemoryTraceStore()
    with GatewayServer(store, EngineUpstream(engine, "scripted")) as server:
        yield ScriptedGateway(engine, server, store)
