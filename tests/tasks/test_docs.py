"""`docs/tasks.md` runs as it stands, with a scripted model behind its URL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from ..docs.pages import DOCS, commands, fences
from .conftest import backend_or_skip

pytestmark = pytest.mark.sandbox


URL = "http://127.0.0.1:8000/v1"


def answer(messages):
    return "done" if any(message["role"] == "assistant" for message in messages) else "echo hello > greeting.txt"


@pytest.fixture
def server():
    with ScriptedServer(ScriptedEngine(answer)) as server:
        yield server


def test_page_runs(tmp_path, monkeypatch, server):
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
                arguments = [server.base_url if word == URL else word for word in arguments]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
                done = subprocess.run(
                    [sys.executable, "-m", "rllm", *arguments],
                    capture_output=True,
                    text=True,
                    env=environment,
                    timeout=300,
                )
                assert done.returncode == 0, done.stdout + done.stderr
                assert " 0.0%" not in done.stdout + done.stderr
