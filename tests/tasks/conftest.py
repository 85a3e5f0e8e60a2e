"""Task folders made by hand."""

from pathlib import Path

import pytest

from ..sandbox.conftest import DEBIAN, backend, backend_or_skip

__all__ = ["DEBIAN", "backend", "backend_or_skip"]
EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


def write_task(folder, files=None):
    """Write a task that is solved when `/app/done` contains yes; `files` replaces files or, with `None`, leaves them out."""
    content = {
        "task.toml": "",
        "instruction.md": "Write the word yes to the file done.\n",
        "environment/Dockerfile": f"FROM {DEBIAN}\nWORKDIR /app\nCOPY notes.txt .\n",
        "environment/notes.txt": "one\ntwo\n",
        "solution/solve.sh": "#!/bin/sh\necho yes > done\n",
        "tests/test.sh": (
            "#!/bin/sh\n"
            'if [ "$(cat /app/done)" = yes ]; then reward=1; else reward=0; fi\n'
            "echo $reward > /logs/verifier/reward.txt\n"
        ),
        **(files or {}),
    }
    for name, text in content.items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


@pytest.fixture
def task_folder(tmp_path):
    def make(files=None, name="task"):
        return write_task(tmp_path / name, files)

    return make
