"""Interface for authors of agents: clients, sessions and trajectories.

    from rllm.sdk import get_chat_client, session, trajectory

Read `context.py` first: sessions, the calls made in them, and `@trajectory`. `client.py` has model clients that record
calls, using `recording.py`. `propagation.py` attributes the calls of unmodified clients and of child processes, with
`patching.py` for threads and `variables.py` for the environment. `programs.py` runs programs.

The clients load `openai` on first use; everything else needs only the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names
from rllm.sdk.context import (
    Session,
    get_current_metadata,
    get_current_session,
    get_current_session_name,
    session,
    trajectory,
)
from rllm.types import Step as StepView
from rllm.types import Trace
from rllm.types import Trajectory as TrajectoryView

if TYPE_CHECKING:
    from rllm.sdk.client import get_chat_client as get_chat_client
    from rllm.sdk.client import get_chat_client_async as get_chat_client_async
    from rllm.sdk.programs import ProgramResult as ProgramResult
    from rllm.sdk.programs import run_program as run_program
    from rllm.sdk.programs import run_program_async as run_program_async
    from rllm.sdk.propagation import bind as bind
    from rllm.sdk.propagation import environment as environment

SessionContext = ContextVarSession = Session
"""The names that users of the rLLM framework know."""

__all__ = [
    "ContextVarSession",
    "ProgramResult",
    "Session",
    "SessionContext",
    "StepView",
    "Trace",
    "TrajectoryView",
    "bind",
    "environment",
    "get_chat_client",
    "get_chat_client_async",
    "get_current_metadata",
    "get_current_session",
    "get_current_session_name",
    "run_program",
    "run_program_async",
    "session",
    "trajectory",
]

__getattr__, _, _names = lazy_names(
    __name__,
    {
        "rllm.sdk.client": "get_chat_client get_chat_client_async",
        "rllm.sdk.programs": "ProgramResult run_program run_program_async",
        "rllm.sdk.propagation": "bind environment",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
