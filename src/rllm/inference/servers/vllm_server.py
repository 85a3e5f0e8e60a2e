"""A vLLM server with exact token capture: started or joined, watched, and restarted when it dies."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rllm._runtime.process import no_fork_meanwhile
from rllm._runtime.supervisor import KILL_S, supervised
from rllm.errors import ConfigError, InferenceError, RLLMError
from rllm.inference.servers.command import ServeOptions, serve_arguments, serve_environment
from rllm.inference.servers.control import VLLMControl, control_of

logger = logging.getLogger(__name__)

_ENDING_S = 5.0
"""Seconds that a process may take to end after it stops answering."""
_START_POLL_S = 0.1
_SLOW_S = 30.0
"""Seconds before a check times out."""
_MAX_SLOW = 5
"""Checks in a row that may time out before the server counts as hung."""


class VLLMServer:
    """One server. While `watch` is on, a server that died or lost its weights is restored."""

    def __init__(
        self,
        control: VLLMControl,
        spawn: Callable[[], ServerProcess] | None = None,
        *,
        start_timeout_s: float = 600.0,
        max_restarts: int = 2,
        watch_interval_s: float = 1.0,
    ) -> None:
        """Prefer `start` or `join`, which pass on the arguments that they do not name.

        Args:
            control: client of the server.
            spawn: starts the process; `None` for a server that was joined.
            start_timeout_s: seconds that a start may take, or that a joined server may be gone.
            max_restarts: restarts before the server is given up.
            watch_interval_s: seconds between two checks of `watch`.
        """
        self.control = control
        self.failure: Exception | None = None
        """Error for which the server was given up; `None` until then."""
        self.num_restarts = 0
        self.start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._watch_interval_s = watch_interval_s
        self._spawn = spawn
        self._process: ServerProcess | None = None
        self._expected: str | None = None
        self._num_slow = 0
        self.changing = threading.RLock()
        """Held while its weights are changed; it is not restarted meanwhile."""
        self._state = threading.Condition()
        self._ready = False
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        options: ServeOptions,
        *,
        command: Sequence[str],
        log: Path,
        scratch: Path | None = None,
        **watching: Any,
    ) -> Self:
        """Start a server and wait until it takes calls.

        Args:
            options: model to serve, and how.
            command: program, see `command.vllm_command`.
            log: file that its output is appended to.
            scratch: folder that is removed if this process is killed.
            **watching: see `VLLMServer`.

        Raises:
            ConfigError: if the port is in use.
            InferenceError: if it ends or is not healthy in time; with the end of its log and the remedy.
        """
        try:
            socket.create_server(("127.0.0.1", options.port)).close()
        except OSError as error:
            raise ConfigError(
                f"vllm.port={options.port}: another program listens there ({error.strerror}): leave it out to use a "
                f"free port, or join that server with vllm.url=http://127.0.0.1:{options.port}/v1"
            ) from error
        arguments = [*command, *serve_arguments(options)]
        environment = serve_environment(options)
        server = cls(
            VLLMControl(f"http://127.0.0.1:{options.port}/v1", api_key=environment.get("VLLM_API_KEY")),
            lambda: ServerProcess(arguments, environment, log, scratch=scratch),
            **watching,
        )
        try:
            server._bring_up()
        except BaseException:
            server.close()
            raise
        server._set_ready(True)
        return server

    @classmethod
    def join(cls, url: str, *, api_key: str | None = None, **watching: Any) -> Self:
        """Connect to the vLLM or SGLang server at a URL that ends in `/v1`; raise `ConfigError` if none answers."""
        try:
            server = cls(control_of(url, api_key=api_key), **watching)
            server.control.models()
        except (InferenceError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"vllm.url={url!r}: no vLLM server answers there ({error}): check that it is running, and that the "
                "address ends in /v1"
            ) from error
        server._set_ready(True)
        return server

    @property
    def url(self) -> str:
        """URL up to and including `/v1`."""
        return self.control.base_url

    @property
    def is_ready(self) -> bool:
        """Return whether it answers with the weights that it received last."""
        return self._ready

    @property
    def pid(self) -> int | None:
        """Process that was started; `None` for a server that was joined."""
        return None if self._process is None else self._process.pid

    def expect(self, marker: str) -> None:
        """Set the `weight_version` to expect; a server with another one has lost its weights."""
        self._expected = marker

    def watch(self, recover: Callable[[], None]) -> None:
        """Restore the server in a thread whenever it is gone; `recover` sends it the weights and checks them."""
        self._watcher = threading.Thread(target=self._watch, args=(recover,), name="rllm vllm watch", daemon=True)
        self._watcher.start()

    def await_ready(self) -> None:
        """Wait until the server is restored, if it is gone; raise `InferenceError` if it was given up."""
        if self.is_gone():
            self._set_ready(False)
            if self._watcher is None:
                log = "" if self._process is None else f" {self._process.why_it_ended()}"
                raise InferenceError(f"vLLM at {self.url} has stopped.{log}", status_code=503)
        with self._state:
            back = self._state.wait_for(
                lambda: self._ready or self.failure is not None, timeout=self.start_timeout_s * (self._max_restarts + 1)
            )
        if not back or self.failure is not None:
            raise InferenceError(f"vLLM has stopped: {self.failure or 'it was not restarted in time'}", status_code=503)

    def close(self) -> None:
        """Stop the server if it was started here. Repeatable."""
        self._closing.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=_SLOW_S)
        self._set_ready(False)
        if self._process is not None:
            self._process.stop()

    def is_gone(self) -> bool:
        """Return whether it has ended or lost its weights. A slow server is not gone."""
        if self._process is not None and self._process.exit_code is not None:
            return True
        try:
            marker = self.control.weight_version(timeout_s=_SLOW_S)
        except InferenceError as error:
            if error.status_code == 504:
                self._num_slow += 1
                return self._num_slow >= _MAX_SLOW
            return True
        self._num_slow = 0
        return self._expected is not None and marker != self._expected

    def _watch(self, recover: Callable[[], None]) -> None:
        try:
            while not self._closing.wait(self._watch_interval_s):
                with self.changing:
                    if not self._closing.is_set() and self.is_gone():
                        self._set_ready(False)
                        self._recover(recover)
        except Exception as error:  # callers that wait for the server must be woken
            if not self._closing.is_set():
                logger.error("%s", error)
            with self._state:
                self.failure = error
                self._state.notify_all()

    def _recover(self, recover: Callable[[], None]) -> None:
        """Start it until it has its weights again; raise `InferenceError` if `max_restarts` is used up."""
        problem = self._why_it_is_gone()
        while self.num_restarts < self._max_restarts and not self._closing.is_set():
            self.num_restarts += 1
            logger.warning(
                "vLLM at %s has stopped (%s): restart %d of %d",
                self.url,
                problem.partition("\n")[0],
                self.num_restarts,
                self._max_restarts,
            )
            try:
                self._bring_up()
                recover()
            except RLLMError as error:
                problem = str(error)
                continue
            self._num_slow = 0
            self._set_ready(True)
            return
        raise InferenceError(
            f"vLLM at {self.url} stopped more often than vllm.max_restarts={self._max_restarts}; the last time: "
            f"{problem}",
            status_code=503,
        )

    def _why_it_is_gone(self) -> str:
        if self._process is not None:
            deadline = time.monotonic() + _ENDING_S
            while self._process.exit_code is None and time.monotonic() < deadline:
                if self._closing.wait(_START_POLL_S):
                    break
            if self._process.exit_code is not None:
                return f"it has ended. {self._process.why_it_ended()}"
        return "it was restarted by someone else, or cannot be reached"

    def _bring_up(self) -> None:
        """Start it unless it was joined, and wait until it takes calls."""
        if self._spawn is not None:
            if self._process is not None:
                self._process.stop()
            self._process = self._spawn()
        deadline = time.monotonic() + self.start_timeout_s
        while not self.control.is_healthy():
            if self._process is not None and (code := self._process.exit_code) is not None:
                raise InferenceError(
                    f"vLLM ended with exit code {code} while it started. {self._process.why_it_ended()}"
                )
            if time.monotonic() >= deadline:
                log = "" if self._process is None else f" {self._process.why_it_ended()}"
                raise InferenceError(
                    f"vLLM at {self.url} was not healthy within vllm.start_timeout_s={self.start_timeout_s:g}: raise "
                    f"it if the model is large, or look for the cause in its log.{log}"
                )
            if self._closing.wait(_START_POLL_S):
                raise InferenceError("vLLM was stopped while it started")

    def _set_ready(self, ready: bool) -> None:
        with self._state:
            self._ready = ready
            self._state.notify_all()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# --- its process ------------------------------------------------------------------------------------------------------

_TAIL_CHARS = 4000
_LINE_CHARS = 400
_ERROR = re.compile(r"(?:Error|Exception|[Ee]rror)[:,] |not supported|unrecognized arguments")
# Errors that do not state their cause, and warnings that look like errors.
_FOLLOWS = re.compile(r"EngineDeadError|See stack trace|failed to automatically increase")
_GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL."""

REMEDIES = {
    r"Address already in use|address already in use": "another program has the port: leave out vllm.port, or free it",
    r"Model architectures? .* (?:is|are) not supported|No model architectures|does not recognize this architecture|"
    r"Cannot find model module": "this vLLM does not know the model: use another version of it (vllm.command), or "
    "model.engine=embedded",
    r"[Hh]ead[ _]size.*not supported|Unsupported head size|Unsupported CPU attention configuration": "vLLM's "
    "attention does not support this model's head size on this machine: use model.engine=embedded",
    r"Free memory on device|No available memory for the cache blocks|out of memory|OutOfMemoryError|"
    r"Not enough memory": "it does not fit into memory: lower vllm.gpu_memory or model.max_length; on a CPU set the "
    "environment variable VLLM_CPU_KVCACHE_SPACE (GiB) lower",
    r"invalid tool call parser": "this vLLM has no such parser of tool calls: see model.tool_parser",
    r"invalid reasoning parser": "this vLLM has no such parser of reasoning: see vllm.reasoning_parser",
    r"unrecognized arguments|invalid choice": (
        "this vLLM does not take these arguments: see vllm.args, or use a newer one"
    ),
    r"No module named": "vLLM's environment is incomplete: start it by hand with the command in the log",
    r"is greater than the derived max_model_len": "the model has no room for so many tokens: lower model.max_length",
    r"PackageNotFoundError|No package metadata": "vLLM's environment has no metadata of a package `vllm`: reinstall it",
}


class ServerProcess:
    """A program that serves until it is stopped, or until this process ends for any reason."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, scratch: Path | None = None
    ) -> None:
        """Start the program; its output is appended to `log`, and `scratch` is removed if this process dies."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            self._log_start = output.tell()
            with no_fork_meanwhile():
                self._control, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        supervised(command, theirs, grace_s=_GRACE_S, scratch=scratch),
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )

    @property
    def pid(self) -> int:
        """Process id of the supervisor, whose child the program is."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; `None` while the program runs."""
        return self._process.poll()

    def why_it_ended(self) -> str:
        """Return the cause of its end according to its log, and the remedy if it is known."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            output = file.read().decode(errors="replace")
        errors = [line for line in output.split("\n") if _ERROR.search(line) and not _FOLLOWS.search(line)]
        remedy = next((remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, "\n".join(errors))), None)
        first = "".join(f"Its log has: {line.strip()[-_LINE_CHARS:]}\n" for line in errors[:2])
        tail = output[-_TAIL_CHARS:].rstrip()
        return f"{f'{remedy}. ' if remedy else ''}{first}The end of its log ({self.log}):\n{tail}"

    def stop(self) -> None:
        """End the program and everything that it started. Repeatable."""
        with self._control, suppress(OSError):  # it has ended, or was stopped before
            self._control.send(b".")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S + 2 * KILL_S)
        self._process.kill()
        self._process.wait()
