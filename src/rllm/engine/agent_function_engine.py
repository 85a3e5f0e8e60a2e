"""`AgentFunctionEngine`: any function as an agent. `f(**task)` returns a reward, and its model calls are trained on."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

from rllm._runtime.threads import in_thread
from rllm.engine.capture import GatewayCapture, RemoteGateway, SessionGateway
from rllm.engine.join import awaited_ids, complete
from rllm.engine.request import RolloutRequest
from rllm.engine.signature import arguments_for, name_of, parameters_of
from rllm.engine.validation import episode_from
from rllm.errors import AgentError, CaptureError, ConfigError, RolloutError, boundary, counted
from rllm.sdk.context import Session
from rllm.sdk.propagation import hints_for
from rllm.store.base import TraceStore
from rllm.types import CLIENT_KEY, VERDICT_KEY, Episode, Trace

logger = logging.getLogger(__name__)

_MAX_CLIENTS = 3
"""Number of clients without a session named in a message."""


@runtime_checkable
class AdvisedAgent(Protocol):
    """Agent function that is named by its `str`, and gives advice of its own, such as one that runs in sandboxes."""

    def remedies(self, base_url: str) -> list[str]:
        """Return advice for a rollout without a model call; `base_url` is where its calls should have arrived."""
        ...


class AgentFunctionEngine:
    """`Rollout` of a sync or async function; used inside `with engine:`.

    The function is called as `f(**task)` and returns one of `rllm.engine.validation.ACCEPTED`. It may use any client
    that reads `OPENAI_BASE_URL`, also one shared by all attempts; clients of `rllm.sdk` find the gateway by themselves.
    Async functions share the runner's event loop; each sync call has a thread of its own.
    """

    def __init__(
        self, agent_run_func: Callable[..., Any], *, gateway: SessionGateway, store: TraceStore | RemoteGateway
    ) -> None:
        if not callable(agent_run_func):
            raise ConfigError(f"agent_run_func={agent_run_func!r}: use a function, such as `def f(question, **kwargs)`")
        self.agent_run_func = agent_run_func
        self.name = str(agent_run_func) if isinstance(agent_run_func, AdvisedAgent) else name_of(agent_run_func)
        self._is_async = any(map(inspect.iscoroutinefunction, (agent_run_func, type(agent_run_func).__call__)))
        self._parameters = parameters_of(agent_run_func)
        self._outlived: dict[Any, str] = {}
        """Processes that have outlived their rollouts, and their names."""
        self._warned_of_processes = False
        self._warned_of_result = False
        self._gateway = gateway
        self._capture = GatewayCapture(gateway, store)

    def __enter__(self) -> Self:
        """Send model clients of this process to the gateway, and attribute their calls."""
        self._capture.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.__exit__()

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """Run the function once, in a session of its own, and join its result with its calls.

        Trajectories of `@trajectory` functions are added to `attempt.trajectories` too.

        Raises:
            AgentError: if the function raises, or returns a value of an unknown type.
            CaptureError: if a trainable result has no model calls, or its calls have no usable tokens.
        """
        started_at = time.time()
        earlier = self._outlived.copy()
        async with self._capture.session(attempt) as session:
            try:
                returned = await self._call(attempt, session.base_url or "")
            except AgentError as error:
                unattributed = await self._capture.unattributed(attempt, started_at)
                called = session.elsewhere or session.programs or unattributed
                if called and not await self._capture.traces(session, set()):
                    raise CaptureError(
                        f"{self._why_nothing_was_captured(session, unattributed)}. In the end {error}"
                    ) from error
                raise
            finally:
                attempt.trajectories.extend(session.trajectories)
                self._note_processes(session, earlier)
        episode = self._understood(returned)
        try:
            traces = await self._capture.traces(session, awaited_ids(episode, attempt, session.llm_calls))
            if not traces and any(path.trainable for path in episode.trajectories):
                unattributed = await self._capture.unattributed(attempt, started_at)
                raise CaptureError(self._why_nothing_was_captured(session, unattributed))
            return complete(episode, attempt, traces, seen=session.llm_calls)
        except RolloutError:
            verdicts = [path for path in episode.trajectories if VERDICT_KEY in path.info]
            attempt.trajectories.extend(replace(path, reward=None, reward_parts={}, steps=[]) for path in verdicts)
            raise

    async def _call(self, attempt: RolloutRequest, base_url: str) -> Any:
        """Return the function's result; a sync function that returns an awaitable counts as async."""
        call = partial(self.agent_run_func, **arguments_for(self._parameters, attempt.own_task(), base_url))
        with boundary(AgentError, self.name):
            if self._is_async:
                return await call()
            returned = await in_thread(call, name=f"rollout {attempt.task_id}:{attempt.index}")
            return await returned if inspect.isawaitable(returned) else returned

    def _understood(self, returned: object) -> Episode:
        """Return the episode of a result; the first failure is logged at once, since it may occur every time."""
        try:
            return episode_from(returned, self.name)
        except AgentError as error:
            if not self._warned_of_result:
                self._warned_of_result = True
                logger.warning("%s", error)
            raise

    def _note_processes(self, session: Session, earlier: Mapping[Any, str]) -> None:
        """Record processes of `multiprocessing` that outlive their rollout.

        Warn once about a process that was recorded earlier and still runs at the end of a later rollout: it may work
        for that one, although its calls belong to the rollout that started it.
        """
        alive = {process: label for process, label in earlier.items() if _runs(process)}
        for process in earlier.keys() - alive.keys():
            self._outlived.pop(process, None)
        self._outlived.update(
            {process: f"{process.name}, pid {process.pid}" for process in session.processes if _runs(process)}
        )
        if alive and not self._warned_of_processes:
            self._warned_of_processes = True
            logger.warning(
                "%s started processes that still run after their rollout (%s): the calls that they make belong to it, "
                "and not to the rollout that they may work for now. Start them before the rollouts, and send them "
                "functions that were bound with rllm.sdk.bind, or use a ProcessPoolExecutor",
                self.name,
                "; ".join(alive.values()),
            )

    def _why_nothing_was_captured(self, session: Session, unattributed: Sequence[Trace]) -> str:
        problem = f"{self.name} made no model call that reached the gateway"
        if unattributed:
            clients = dict.fromkeys(str(trace.metadata.get(CLIENT_KEY)) for trace in unattributed)
            problem = (
                f"{self.name} made no model call in its session, but while it ran "
                f"{counted(len(unattributed), 'call')} reached the gateway without a session, from "
                f"{'; '.join(list(clients)[:_MAX_CLIENTS])} (stored in the session "
                f"{unattributed[0].session_id!r})"
            )
        if left := [label for item, label in self._outlived.items() if item not in session.processes and _runs(item)]:
            problem += f" (processes of earlier rollouts still run, and their calls belong to those: {'; '.join(left)})"
        if session.elsewhere:
            problem += f" (it called {', '.join(session.elsewhere)})"
        if session.programs:
            problem += f", nor did {', '.join(session.programs)}, which it started"
        if isinstance(self.agent_run_func, AdvisedAgent):
            return f"{problem}: {'; '.join(self.agent_run_func.remedies(session.base_url or ''))}"
        to_processes = (
            "pass `base_url`, or functions bound with rllm.sdk.bind, to processes that are older than the rollout"
        )
        remedies = [
            *([to_processes] if unattributed else []),
            *hints_for(programs=session.programs),
            f"make its client read OPENAI_BASE_URL (which is {self._gateway.url}/v1 during rollouts; a client made "
            "before that has missed it) or ANTHROPIC_BASE_URL, make it with rllm.sdk.get_chat_client, or give the "
            f"function a parameter `base_url`, here {session.base_url}",
            *([] if session.programs else ["start programs with rllm.sdk.run_program"]),
            *([] if unattributed else [to_processes]),
            "an agent that needs no model returns Trajectory(reward=..., trainable=False)",
        ]
        return f"{problem}: {'; '.join(remedies)}"


def _runs(process: Any) -> bool:
    """Return whether a process of `multiprocessing` is known to be alive."""
    try:
        return bool(process.is_alive())
    except (ValueError, AssertionError):  # closed, or started by a process that this one was forked from
        return False
