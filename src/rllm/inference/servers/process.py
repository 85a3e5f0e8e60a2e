"""A server's process: started under a guard, logging to a file, stopped with everything it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rllm._runtime.process import no_fork_meanwhile
from rllm.inference.servers import guard

_TAIL_CHARS = 4000
_LINE_CHARS = 400
_ERROR = re.compile(r"(?:Error|Exception|[Ee]rror)[:,] |not supported|unrecognized arguments")
# Errors that do not state their cause, and warnings that look like errors.
_FOLLOWS = re.compile(r"EngineDeadError|See stack trace|failed to automatically increase")
_STOP_TIMEOUT_S = guard.STOP_TIMEOUT_S + 10.0

REMEDIES = {
    r"Address already in use|address already in use": "another program has the port: leave out vllm.port, or free it",
    r"Model architectures? .* (?:is|are) not supported|No model architectures|does not recognize this architecture|"
    r"Cannot find model module": "this vLLM does not know the model: use another version of it (vllm.command), or "
    "model.engine=embedded",
    r"[Hh]ead[ _]size.*not supported|Unsupported head size|Unsupported CPU attention configuration": "vLLM has no "
    "attention for this model's head size here: train it with model.engine=embedded",
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
        """Start the program.

        Args:
            command: program and arguments.
            environment: all of its environment variables.
            log: file that its output is appended to.
            scratch: folder that is removed if this process dies.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            self._log_start = output.tell()
            with no_fork_meanwhile():
                self._process = subprocess.Popen(
                    [sys.executable, "-I", guard.__file__, str(scratch or ""), *command],
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    @property
    def pid(self) -> int:
        """Process id of the guard, which leads the process group."""
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
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
