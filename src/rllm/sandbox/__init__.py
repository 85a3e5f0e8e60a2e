"""Sandboxes for programs that are not trusted: agents on tasks, and verifiers of their work.

Read `base.py` first: the interface. Each backend is a module: `bubblewrap` (`local`), `containers` (`podman`, `docker`)
and so on. `pool` bounds a backend, `route` lets a sandbox reach one server, and `namespaces` is the program that enters
a sandbox of this machine from outside. `python` runs single Python programs, with `call_filter`.
"""

from rllm.sandbox.base import (
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxLimits,
    SandboxSpec,
    open_backend,
)

__all__ = ["ExecResult", "Sandbox", "SandboxBackend", "SandboxError", "SandboxLimits", "SandboxSpec", "open_backend"]
