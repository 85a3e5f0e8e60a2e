"""`rllm tasks`: check task folders."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli import terminal
from rllm.cli.options import OnlyJson, StrictCommand
from rllm.errors import counted

if TYPE_CHECKING:
    from rllm.tasks.check import TaskCheck

tasks = typer.Typer(
    name="tasks",
    rich_markup_mode=None,
    help="Check task folders, on which agents work in sandboxes.",
    no_args_is_help=True,
)


@tasks.callback()
def _group() -> None:
    """Check task folders, on which agents work in sandboxes."""


@tasks.command(cls=StrictCommand)
def check(
    source: Annotated[
        str,
        typer.Argument(
            help="Task folder, folder of task folders, or URL of a git repository: URL#REF:SUBFOLDER.",
            metavar="DIR|URL",
        ),
    ],
    sandbox: Annotated[str, typer.Option(help="Kind of sandboxes: local, podman, docker, ...")] = "local",
    max_concurrent: Annotated[int, typer.Option(help="Number of tasks checked at the same time.", min=1)] = 2,
    as_json: OnlyJson = False,
) -> None:
    """Check that each task's solution passes its verifier, and that doing nothing does not.

    Exit code 1 if a task does not pass, 2 if a folder cannot be read.
    """
    from rllm.sandbox import open_backend
    from rllm.sandbox.pool import SandboxPool
    from rllm.tasks.check import check_tasks
    from rllm.tasks.folder import read_tasks

    found = read_tasks(source)
    backend = SandboxPool(open_backend(sandbox), concurrency=max_concurrent)
    console = terminal.console(stderr=True)

    def report(task: TaskCheck) -> None:
        console.print(f"{task.task}: {'ok' if task.ok else 'failed'}", markup=False)

    checked = asyncio.run(check_tasks(found, backend, max_concurrent=max_concurrent, on_check=report))
    num_failed = sum(not task.ok for task in checked)
    if as_json:
        terminal.print_json({"tasks": [task.to_dict() for task in checked], "ok": not num_failed})
    else:
        rows = []
        for task in checked:
            rewards = ("none" if reward is None else f"{reward:g}" for reward in (task.solution, task.nothing))
            verdict = "ok" if task.ok else "\n".join(task.problems)
            rows.append([task.task, *rewards, f"{task.seconds:.1f}", verdict])
        terminal.print_table(["task", "solution", "nothing", "seconds", "result"], rows)
        summary = f"{num_failed} of {counted(len(checked), 'task')} failed" if num_failed else "All tasks can be used."
        terminal.console(wide=True).print(summary, markup=False)
    if num_failed:
        raise typer.Exit(1)
