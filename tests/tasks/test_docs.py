"""`docs/tasks.md` runs as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..docs.pages import DOCS, commands, fences
from .conftest import backend_or_skip

pytestmark = pytest.mark.sandbox


def test_the_page_runs(tmp_path, monkeypatch):
    backend_or_skip("local")
    monkeypatch.chdir(tmp_path)
    for fence in fences(DOCS / "tasks.md"):
        if fence.title:
            Path(fence.title).parent.mkdir(parents=True, exist_ok=True)
            Path(fence.title).write_text(fence.text)
        elif fence.language == "python":
            exec(compile("\n" * fence.line + fence.text, "docs/tasks.md", "exec"), {"__name__": "__main__"})
        elif fence.language == "sh":
            for _, *arguments in commands(fence):
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
                done = subprocess.run(
                    [sys.executable, "-m", "rllm", *arguments],
                    capture_output=True,
                    text=True,
                    env=environment,
                    timeout=300,
                )
                assert done.returncode == 0, done.stdout + done.stderr
