"""Tasks that agents work on in sandboxes: folders in Harbor's format, with a verifier that rewards the result.

Read `task.py` first: a `TaskFolder`, a `SandboxAgent` and the `TaskOutcome` of a rollout.
"""

from rllm.tasks.task import FileChange, SandboxAgent, TaskFolder, TaskOutcome

__all__ = ["FileChange", "SandboxAgent", "TaskFolder", "TaskOutcome"]
