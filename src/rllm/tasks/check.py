"""Check of tasks: their solution must pass, and doing nothing must not. Both are agents that need no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rllm.errors import AgentError, RolloutError, last_lines, ungrouped
from rllm.sandbox.base import Sandbox, SandboxBackend
from rllm.tasks.run import run_task
from rllm.tasks.task import SandboxAgent, TaskFolder
from rllm.types import JSONObject


class Oracle(SandboxAgent):
    """Runs `solution/solve.sh` of its task."""

    name = "oracle"
    uses_model = False

    def __init__(self, task: TaskFolder | None = None) -> None:
        """Create the oracle of a task, or one from which `for_task` makes others."""
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


@dataclass(frozen=True, kw_only=True)
class TaskCheck:
    """Rewards of the task's solution and of doing nothing; `None` if there is none."""

    task: str
    solution: float | None
    nothing: float | None
    problems: tuple[str, ...]
    seconds: float
    """Duration of both rollouts, with the time to build images."""

    @property
    def ok(self) -> bool:
        """Return whether the task can be used."""
        return not self.problems

    def to_dict(self) -> JSONObject:
        """Return the fields as JSON values."""
        return {**asdict(self), "problems": list(self.problems), "ok": self.ok}


async def check_tasks(
    tasks: Sequence[TaskFolder],
    backend: SandboxBackend,
    *,
    max_concurrent: int = 2,
    on_check: Callable[[TaskCheck], None] | None = None,
) -> list[TaskCheck]:
    """Check each task in sandboxes of a backend.

    Args:
        tasks: the tasks.
        backend: where sandboxes are started.
        max_concurrent: tasks that are checked at a time.
        on_check: called with each result as it comes.
    """
    slots = asyncio.Semaphore(max_concurrent)

    async def check(task: TaskFolder) -> TaskCheck:
        async with slots:
            checked = await check_task(task, backend)
        if on_check is not None:
            on_check(checked)
        return checked

    with ungrouped():
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(check(task)) for task in tasks]
    return [one.result() for one in running]


async def check_task(task: TaskFolder, backend: SandboxBackend) -> TaskCheck:
    """Check one task: its solution must have a reward of 1 or more, and doing nothing less than 1."""
    started = asyncio.get_running_loop().time()
    solution, solved, output = await _reward(task, Oracle(), backend)
    nothing, idled, _ = await _reward(task, Idle(), backend)
    problems = [*solved, *(problem for problem in idled if problem not in solved)]
    if solution is not None and solution < 1:
        problems.append(
            f"the solution has a reward of {solution:g}, not 1: fix solution/solve.sh or tests/test.sh; the verifier "
            f"sees the working directory and artifacts=[...] only; it printed: {_ends(output) or 'nothing'}"
        )
    if nothing is not None and nothing >= 1:
        problems.append(f"doing nothing has a reward of {nothing:g}: tests/test.sh must fail before the task is done")
    return TaskCheck(
        task=task.name,
        solution=solution,
        nothing=nothing,
        problems=tuple(problems),
        seconds=asyncio.get_running_loop().time() - started,
    )


async def _reward(
    task: TaskFolder, agent: SandboxAgent, backend: SandboxBackend
) -> tuple[float | None, list[str], str]:
    """Return the reward of a rollout, if there is one, its problems, and its verifier's output."""
    try:
        outcome = await run_task(task, agent, backend)
    except RolloutError as error:
        return None, [f"{type(error).__name__}: {_ends(str(error))}"], ""
    if outcome.agent_timed_out:
        problems = [f"{agent} was stopped after agent.timeout_sec={task.agent_timeout_s:g}"]
        return outcome.reward, problems, outcome.verifier_output
    return outcome.reward, [], outcome.verifier_output


def _ends(text: str) -> str:
    """Return the first line of a text and, if it has more, the last: a program's last line has its error."""
    first, *others = text.strip().split("\n")
    return f"{first} [...] {others[-1]}" if others else first
