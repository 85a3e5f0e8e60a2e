"""Agents without a model: the oracle, which knows the solution, and one that does nothing."""

from __future__ import annotations

from rllm.errors import AgentError, last_lines
from rllm.sandbox.base import Sandbox
from rllm.tasks.task import SandboxAgent, TaskFolder


class Oracle(SandboxAgent):
    """Runs `solution/solve.sh` of its task."""

    name = "oracle"
    uses_model = False

    def __init__(self, task: TaskFolder | None = None) -> None:
        """Create the oracle of a task, or one that `for_task` makes others of."""
        self.task = task

    def for_task(self, task: TaskFolder) -> Oracle:
        """Return the oracle of a task."""
        return Oracle(task)

    async def run(
        self, instruction: str, sandbox: Sandbox, *, base_url: str, api_key: str, model: str, timeout_s: float
    ) -> None:
        """Copy the solution to `/solution` and run it.

        Raises:
            AgentError: if the task has no solution, or it fails.
        """
        if self.task is None or not (self.task.solution / "solve.sh").is_file():
            raise AgentError("the task has no solution/solve.sh: write it, or use another agent")
        await sandbox.upload(self.task.solution, "/solution")
        ended = await sandbox.exec(
            "chmod +x /solution/solve.sh && exec /solution/solve.sh", env=self.task.solution_env, timeout_s=timeout_s
        )
        if not ended.ok:
            raise AgentError(f"solution/solve.sh failed ({ended.failure(timeout_s)}): {last_lines(ended.output)}")


class Idle(SandboxAgent):
    """Ends without doing anything."""

    name = "nop"
    uses_model = False

    async def run(
        self, instruction: str, sandbox: Sandbox, *, base_url: str, api_key: str, model: str, timeout_s: float
    ) -> None:
        """Do nothing."""
