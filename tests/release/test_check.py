"""Checks of a wheel, before it is installed."""

from __future__ import annotations

import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from .check import NEEDED, ROOT, check_wheel, version_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout with the files that are not imported."""
    for name in NEEDED:
        file = tmp_path / "source" / "src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    return tmp_path / "source"


def wheel_of(folder: Path, *names: str) -> Path:
    wheel = folder / "rllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in (*names, "rllm-1.0.dist-info/METADATA"):
            files.writestr(name, "")
    return wheel


def test_complete_wheel_passes(source: Path, tmp_path: Path) -> None:
    check_wheel(wheel_of(tmp_path, *NEEDED), source)


def test_missing_file_is_reported(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"not in the wheel: \{'rllm/py.typed'\}"):
        check_wheel(wheel_of(tmp_path, *NEEDED[1:]), source)


def test_uncommitted_file_is_reported(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"only in the wheel: \{'rllm/notes.txt'\}"):
        check_wheel(wheel_of(tmp_path, *NEEDED, "rllm/notes.txt"), source)


def test_tests_are_not_packaged(source: Path, tmp_path: Path) -> None:
    (source / "src" / "rllm" / "tests").mkdir()
    (source / "src" / "rllm" / "tests" / "test_it.py").write_text("")
    with pytest.raises(SystemExit, match="tests are in the wheel"):
        check_wheel(wheel_of(tmp_path, *NEEDED, "rllm/tests/test_it.py"), source)


def test_files_needed_by_the_check_exist() -> None:
    assert all((ROOT / "src" / name).is_file() for name in NEEDED)
    assert f'__version__ = "{version_of(ROOT)}"' in (ROOT / "src" / "rllm" / "__init__.py").read_text()


def test_declared_pythons_are_those_of_the_workflows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {match[1] for name in project["classifiers"] if (match := re.fullmatch(r".* :: Python :: (3\.\d+)", name))}
    workflows = [file.read_text() for file in (ROOT / ".github/workflows").iterdir()]
    assert named == {version for text in workflows for version in re.findall(r'"(3\.\d+)"', text)}


def test_missing_or_outdated_python_is_reported(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 2.7.18 >&2\nexit 1\n')  # the format of Python 2
    old.chmod(0o755)
    for python, expected in [
        (old, "this is Python 2.7.18. Use: make PYTHON="),
        ("no-python", "not found. Use: make PYTHON="),
    ]:
        command = ["make", "-C", str(ROOT), f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", "demo"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        [reported] = [line for line in done.stdout.splitlines() if line.startswith("rllm ")]
        assert reported.startswith("rllm needs Python 3.11 or newer; this is ")
        assert expected in reported
