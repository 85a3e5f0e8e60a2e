"""The Python sandbox as a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rllm.sandbox.python import PythonOptions, SandboxResult, arun_python, run_python
from rllm.tools.tool_base import MAX_OUTPUT_CHARS, Tool, ToolOutput

__all__ = ["CodeToolOutput", "PythonInterpreter"]

Code = Annotated[str, Field(description="a complete Python program; each call starts afresh, without network")]
_CUT = "\n[cut: the code printed more than is kept]"


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
        name: name of the tool.
        description: by default the sentence above.
        timeout_s: wall-clock seconds that a call may take.
        memory_mb: mebibytes that it may use.
        max_output_chars: limit of the output that the model sees.
    """

    def __init__(
        self,
        name: str = "python",
        description: str | None = None,
        *,
        timeout_s: float = 10,
        memory_mb: int = 512,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        super().__init__(name, description, max_output_chars=max_output_chars)
        self._limits: PythonOptions = {
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "max_output_bytes": max(0, max_output_chars - len(_CUT)),  # otherwise the note itself is cut
            "show_last_value": True,
        }

    def forward(self, code: Code) -> CodeToolOutput:
        """Run the code and wait."""
        return self._tool_output(run_python(code, **self._limits))

    async def async_forward(self, code: Code) -> CodeToolOutput:
        """Run the code without blocking the event loop."""
        return self._tool_output(await arun_python(code, **self._limits))

    def _tool_output(self, result: SandboxResult) -> CodeToolOutput:
        error = None if result.ok else result.stderr or f"the code ended with exit code {result.exit_code}"
        if result.timed_out:
            error = f"the code did not end within {self._limits['timeout_s']:g} seconds"
        return CodeToolOutput(
            name=self.name,
            output=result.stdout + (_CUT if result.truncated else "") if result.ok else None,
            error=error,
            stdout=result.stdout,
            stderr=result.stderr,
            metadata={"exit_code": result.exit_code, "truncated": result.truncated, "network": result.network},
        )
