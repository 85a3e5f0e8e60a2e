"""Sandboxes for programs that are not trusted: agents on tasks, and verifiers of their work.

Read `base` first: the interface. The backends:

* `bubblewrap` (`local`), on this machine: `images` has its file systems, `namespaces` is the program that starts or
  enters a sandbox, `control_groups` limits its processes, and `call_filter` its system calls.
* `containers` (`podman`, `docker`) and `kubernetes`, by their client programs; `client` is what they share.
* `remote`: E2B, Daytona and Modal.

`pool` bounds a backend, `route` lets a sandbox reach one server, `files` moves files in and out, and `owner` cleans up
after a process that was killed. `python` runs single Python programs, in `python_child`.
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
