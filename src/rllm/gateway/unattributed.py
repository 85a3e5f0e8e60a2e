"""Calls that name no session while rollouts are under way: stored together, counted and logged once.

Such a call comes from a process or a client that has no session, and so belongs to no rollout, although it may have
been made in one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rllm.gateway.identity import openly_named, own_session
from rllm.types import CLIENT_KEY

logger = logging.getLogger(__name__)

_LOOPBACK = {"127.0.0.1", "::1"}
_MAX_LOOKUPS = 8
_SCRIPTS = (".py", ".js", ".mjs", ".ts", ".sh")


def unattributed_session(run_id: str | None) -> str:
    """Return the id of the session that keeps the unattributed calls of a run."""
    return f"unattributed-{run_id}" if run_id else "unattributed"


class Unattributed:
    """Unattributed calls of one gateway; touched only from its event loop, except `expect_sessions`."""

    def __init__(self) -> None:
        self.session_id: str | None = None
        """Session that keeps them; `None` while no rollout has begun, when calls need no session."""
        self.num_calls = 0
        self._processes: dict[str, str] = {}
        """Processes at the other end of the first connections."""
        self._warned_of: str | None = None

    def expect_sessions(self, metadata: Mapping[str, Any]) -> None:
        """Take note of a session that was opened: from the first one of a rollout on, calls are to name one."""
        if "split" in metadata:
            self.session_id = unattributed_session(metadata.get("run_id"))

    def attributed(self, named: str | None, path: str | None, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the session of a call from the one it names; during rollouts not one that its client made up."""
        if named is None:
            return None
        is_clients_own = not openly_named(path, headers) and named == own_session(headers)
        return None if self.session_id is not None and is_clients_own else named

    def note(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], *, is_refused: bool = False
    ) -> dict[str, Any]:
        """Count a call that names no session, and return the metadata to store with it, unless it is refused."""
        if self.session_id is None:
            return {}
        self.num_calls += 1
        client = self._client_of(scope, headers)
        if self._warned_of != self.session_id:
            self._warned_of = self.session_id
            logger.warning(
                "a model call came without a session while rollouts are under way, from %s: it belongs to no rollout "
                "and is not trained on. Such calls are %s and counted as dropped/unattributed_call. "
                "Pass the agent's base_url, or rllm.sdk.bind(function), to the process that makes them",
                client,
                "refused for lack of a key" if is_refused else f"stored in the session {self.session_id!r}",
            )
        return {CLIENT_KEY: client}

    def _client_of(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str:
        """Describe the client of a call."""
        agent = headers.get(b"user-agent", b"").decode("latin-1") or "an unnamed client"
        host, port = scope.get("client") or ("", 0)
        if host not in _LOOPBACK:
            return f"{agent} at {host}" if host else agent
        connection = f"{agent} {port}"
        if connection not in self._processes and len(self._processes) < _MAX_LOOKUPS:
            self._processes[connection] = _process_behind(port)
        process = self._processes.get(connection, "")
        return f"{agent} ({process})" if process else agent


def _process_behind(port: int) -> str:
    """Return the process on this machine with a connection from this port, as `process 12: python agent.py`; else "".

    Other arguments are left out, since this is stored, and they may hold secrets.
    """
    with suppress(OSError, IndexError, ValueError):
        inode = _inode_of(port)
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                if str(link.readlink()) == f"socket:[{inode}]":
                    pid = link.parts[2]
                    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                    script = Path(words[1]).name if words[1:] and words[1].endswith(_SCRIPTS) else ""
                    here = " (this one)" if int(pid) == os.getpid() else ""
                    return f"process {pid}{here}: {Path(words[0]).name} {script}".rstrip()
    return ""


def _inode_of(port: int) -> str:
    lines = Path("/proc/net/tcp").read_text().split("\n")[1:-1]
    return next((f[9] for f in map(str.split, lines) if f[1].endswith(f":{port:04X}")), "none")
