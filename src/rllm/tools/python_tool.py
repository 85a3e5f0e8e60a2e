"""The Python sandbox as a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rllm.errors import ConfigError
from rllm.tools.sandbox import SandboxResult, arun_python, run_python
from rllm.tools.tool_base import Tool, ToolOutput

__all__ = ["CodeToolOutput", "PythonInterpreter"]

Code = Annotated[str, Field(description="a complete Python program; each call starts afresh, without network")]


@dataclass
class CodeToolOutput(ToolOutput):
    """Result of running code; `output` has what it printed, and the value of its last line."""

    stdout: str | None = None
    stderr: str | None = None

    def to_string(self) -> str:
        """Return what the code printed, followed by the error if it failed."""
        if self.error is None:
            return super().to_string()
        cut = f"{_CUT}\n" if self.metadata and self.metadata.get("truncated") else ""
        return f"{self.stdout or ''}{cut}Error: {self.error}"


class PythonInterpreter(Tool):
    """Run Python code and see what it prints, and the value of its last line if that is an expression.

    Args:
        timeout_s: wall-clock seconds that a call may take.
        memory_mb: mebibytes that it may use.
        backend: `local` is the one there is.
    """

    def __init__(
        self,
        name: str = "python",
        description: str | None = None,
        *,
        backend: str = "local",
        timeout_s: float = 10,
        memory_mb: int = 512,
        **settings: Any,
    ) -> None:
        if backend != "local":
            raise ConfigError(f"backend={backend!r}: code runs on this machine only; use backend='local'")
        super().__init__(name, description, **settings)
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb

    def forward(self, code: Code) -> CodeToolOutput:
        """Run the code and wait."""
        return self._told(run_python(code, **self._limits))

    async def async_forward(self, code: Code) -> CodeToolOutput:
        """Run the code beside the event loop."""
        return self._told(await arun_python(code, **self._limits))

    @property
    def _limits(self) -> dict[str, Any]:
        return {
            "timeout_s": self.timeout_s,
            "memory_mb": self.memory_mb,
            "max_output_bytes": max(0, self.max_output_chars - len(_CUT)),  # else the note itself is cut
            "show_last_value": True,
        }

    def _told(self, result: SandboxResult) -> CodeToolOutput:
        return CodeToolOutput(
            name=self.name,
            output=None if not result.ok else result.stdout + (_CUT if result.truncated else ""),
            error=self._reason(result),
            stdout=result.stdout,
            stderr=result.stderr,
            metadata={"exit_code": result.exit_code, "truncated": result.truncated, "network": result.network},
        )

    def _reason(self, result: SandboxResult) -> str | None:
        if result.timed_out:
            return f"the code did not end within {self.timeout_s:g} seconds"
        if result.ok:
            return None
        return result.stderr or f"the code ended with exit code {result.exit_code}"


_CUT = "\n[cut: the code printed more than is kept]"
