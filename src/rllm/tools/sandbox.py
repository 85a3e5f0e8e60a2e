"""The Python sandbox, see `rllm.sandbox.python`."""

from rllm.sandbox.python import SandboxError, SandboxResult, arun_python, run_python

__all__ = ["SandboxError", "SandboxResult", "arun_python", "run_python"]
