"""Generated shell tasks: their own solutions must give the expected files, in a real shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.tasks.shell_tasks import KINDS, shell_task_folders, shell_tasks


@pytest.mark.parametrize("task", shell_tasks(2 * len(KINDS), seed=7), ids=lambda task: task.kind)
def test_solution_creates_the_expected_files(task, tmp_path: Path) -> None:
    task.write(tmp_path)
    work = tmp_path / "environment" / "files"
    assert {path.name: path.read_text() for path in work.iterdir()} == task.files != task.expected
    subprocess.run(["sh", tmp_path / "solution" / "solve.sh"], cwd=work, check=True)
    assert {path.name: path.read_text() for path in work.iterdir()} == task.expected


def test_tasks_are_distinct_and_follow_from_the_seed() -> None:
    tasks = shell_tasks(40, seed=0)
    assert tasks == shell_tasks(80, seed=0)[:40]
    assert not {task.instruction for task in tasks} & {task.instruction for task in shell_tasks(40, seed=1)}
    assert {task.kind for task in tasks} == set(KINDS)


def test_folders_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_CACHE", str(tmp_path))
    folder = shell_task_folders(3, seed=0)
    assert [path.name for path in sorted(folder.iterdir())] == ["000-create", "001-rename", "002-copy"]
    assert shell_task_folders(3, seed=0) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_requesting_too_many_tasks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="10000 tasks"):
        shell_tasks(10_000, seed=0)
