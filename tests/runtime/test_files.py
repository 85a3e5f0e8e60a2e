import fcntl
import os
import re
import sys
import time
from pathlib import Path

import pytest

from rllm._runtime.files import cache_folder, new_folder, replace_text, sync


def test_macos_uses_full_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: asked.append(command))
    replace_text(tmp_path / "settings.yaml", "seed: 1")
    assert asked == [51, 51], "the file, and the folder that it was moved into"


def test_file_system_without_full_fsync_uses_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", -1, raising=False)  # which Linux does not have
    monkeypatch.setattr(os, "fsync", asked.append)
    with (tmp_path / "file").open("w") as file:
        sync(file.fileno())
        assert asked == [file.fileno()]


def test_only_a_newline_ends_a_line() -> None:
    """`str.splitlines` splits at characters that models and users write in texts; that of bytes does not."""
    of_bytes = {"capture/stream.py", "tracking/base.py"}
    source = Path(__file__).parents[2] / "src" / "rllm"
    files = {path.relative_to(source).as_posix(): path.read_text() for path in source.rglob("*.py")}
    assert {name for name, text in files.items() if re.search(r"\.splitlines\(|iter_lines\(", text)} == of_bytes


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("RLLM_CACHE", raising=False)
    assert cache_folder() == Path("/cache/rllm")
    monkeypatch.setenv("RLLM_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"
    monkeypatch.delenv("RLLM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "rllm"


def test_folders_of_the_same_second_have_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-120000")
    for name in ("20260101-120000", "20260101-120000-2", "20260101-120000-3"):
        assert new_folder(tmp_path) == tmp_path / name
        (tmp_path / name).mkdir()
