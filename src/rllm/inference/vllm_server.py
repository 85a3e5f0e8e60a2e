"""A vLLM server that is started, or joined, and kept alive: `vllm serve` with what exact capture needs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rllm.errors import ConfigError, InferenceError, RLLMError
from rllm.inference.sglang.control import control_of
from rllm.inference.vllm.command import ServeOptions, serve_arguments, serve_environment
from rllm.inference.vllm.control import VLLMControl
from rllm.inference.vllm.process import ServerProcess

logger = logging.getLogger(__name__)

_ENDING_S = 5.0
"""How long a process may take to end that no longer answers at its port."""
_START_POLL_S = 0.1
_SLOW_S = 30.0
_MAX_SLOW = 5
"""So many unanswered questions in a row, of 30 s each, mean that a server hangs."""


class VLLMServer:
    """One server. While `watch` is on, a server that is gone, or that has forgotten its weights, is brought back."""

    def __init__(
        self,
        control: VLLMControl,
        spawn: Callable[[], ServerProcess] | None = None,
        *,
        start_timeout_s: float = 600.0,
        max_restarts: int = 2,
        watch_interval_s: float = 1.0,
    ) -> None:
        """Use `start` or `join`, which hand on what they do not name.

        Args:
            control: of the server.
            spawn: starts it; `None` for one that is not ours.
            start_timeout_s: how long a start may take, or how long a server that is not ours may be gone.
            max_restarts: how often it is brought back.
            watch_interval_s: how often `watch` looks.
        """
        self.control = control
        self.failure: Exception | None = None
        """Why it will not come back."""
        self.num_restarts = 0
        self.start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._watch_interval_s = watch_interval_s
        self._spawn = spawn
        self._process: ServerProcess | None = None
        self._expected: str | None = None
        self._num_slow = 0
        self._changing = threading.RLock()
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
        """Start a server, and wait until it takes calls.

        Args:
            options: what is served, and how.
            command: the program, see `command.vllm_command`.
            log: the file that its output is appended to.
            scratch: a folder that is removed if this process is killed.
            **watching: see `VLLMServer`.

        Raises:
            ConfigError: if the port is in use.
            InferenceError: if it ends, or is not healthy in time; with the end of its log, and what helps.
        """
        _check_port(options.port)
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
        """Take up a server that runs, vLLM's or SGLang's.

        Args:
            url: its address, up to and including `/v1`.
            api_key: its key, if it needs one.
            **watching: see `VLLMServer`.

        Raises:
            ConfigError: if there is none.
        """
        try:
            server = cls(control_of(url, api_key=api_key), **watching)
            server.control.models()
        except (InferenceError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"vllm.url={url!r}: there is no vLLM server ({error}): see whether it is running, and whether the address "
                "goes up to and including /v1"
            ) from error
        server._set_ready(True)
        return server

    @property
    def url(self) -> str:
        """Up to and including `/v1`."""
        return self.control.base_url

    @property
    def is_ready(self) -> bool:
        """Whether it answers with the weights that it was given last."""
        return self._ready

    @property
    def pid(self) -> int | None:
        """Of the process group that was started; `None` for a server that was joined."""
        return None if self._process is None else self._process.pid

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, its weights may be changed; it is not brought back meanwhile."""
        with self._changing:
            yield

    def expect(self, marker: str) -> None:
        """What `weight_version` is to say from now on; a server that says something else has forgotten its weights."""
        self._expected = marker

    def watch(self, recover: Callable[[], None]) -> None:
        """Bring it back where it is gone, from a thread.

        Args:
            recover: gives the weights back to a server that has started anew, and proves that it has them.
        """
        self._watcher = threading.Thread(target=self._watch, args=(recover,), name="rllm vllm watch", daemon=True)
        self._watcher.start()

    def await_ready(self) -> None:
        """Wait until it is back, if it is gone.

        Raises:
            InferenceError: if it will not come back.
        """
        if self.is_gone():
            self._set_ready(False)
            if self._watcher is None:
                log = "" if self._process is None else f" {self._process.why_it_ended()}"
                raise InferenceError(f"vLLM at {self.url} is gone.{log}", status_code=503)
        with self._state:
            back = self._state.wait_for(
                lambda: self._ready or self.failure is not None, timeout=self.start_timeout_s * (self._max_restarts + 1)
            )
        if not back or self.failure is not None:
            raise InferenceError(f"vLLM is gone: {self.failure or 'it did not come back in time'}", status_code=503)

    def close(self) -> None:
        """Stop it, if it was started here. Repeatable."""
        self._closing.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=_SLOW_S)
        self._set_ready(False)
        if self._process is not None:
            self._process.stop()

    def is_gone(self) -> bool:
        """Whether it has ended, or has forgotten its weights. A server that is slow is there."""
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
                with self._changing:
                    if not self._closing.is_set() and self.is_gone():
                        self._set_ready(False)
                        self._recover(recover)
        except Exception as error:  # whoever waits for the server has to hear of it
            self._give_up(error)

    def _recover(self, recover: Callable[[], None]) -> None:
        """Start it until it is as it was.

        Raises:
            InferenceError: if it was started as often as it may be.
        """
        problem = self._why_it_is_gone()
        while self.num_restarts < self._max_restarts and not self._closing.is_set():
            self.num_restarts += 1
            logger.warning("vLLM at %s is gone (%s): start %d of %d", *self._names(problem))
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
            f"vLLM at {self.url} was gone more often than vllm.max_restarts={self._max_restarts}; the last time: {problem}",
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
        return "it was restarted, or cannot be reached"

    def _give_up(self, error: Exception) -> None:
        if not self._closing.is_set():
            logger.error("%s", error)
        with self._state:
            self.failure = error
            self._state.notify_all()

    def _names(self, problem: str) -> tuple[str, str, int, int]:
        return self.url, problem.partition("\n")[0], self.num_restarts, self._max_restarts

    def _bring_up(self) -> None:
        """Start it, if it is ours, and wait until it takes calls."""
        if self._spawn is not None:
            if self._process is not None:
                self._process.stop()
            self._process = self._spawn()
        deadline = time.monotonic() + self.start_timeout_s
        while not self.control.is_healthy():
            if self._process is not None and (code := self._process.exit_code) is not None:
                raise InferenceError(f"vLLM ended with exit code {code} as it started. {self._process.why_it_ended()}")
            if time.monotonic() >= deadline:
                log = "" if self._process is None else f" {self._process.why_it_ended()}"
                raise InferenceError(
                    f"vLLM at {self.url} was not healthy within vllm.start_timeout_s={self.start_timeout_s:g}: raise it "
                    f"if the model is large, or see what keeps it.{log}"
                )
            if self._closing.wait(_START_POLL_S):
                raise InferenceError("vLLM was stopped while it started")

    def _set_ready(self, ready: bool) -> None:
        with self._state:
            self._ready = ready
            self._state.notify_all()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _check_port(port: int) -> None:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return
    except OSError as error:
        raise ConfigError(
            f"vllm.port={port}: another program listens there ({error.strerror}): leave it out to take a free one, or join "
            f"that server with vllm.url=http://127.0.0.1:{port}/v1"
        ) from error
