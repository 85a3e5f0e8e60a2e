"""The pages of docs/frameworks show code that runs, and numbers that were measured; in the fast suite."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rllm.testing import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from . import table as table_of_docs
from .rollouts import EXAMPLES, ROOT
from .shopping import ARGUMENTS, TOTAL, sentence
from .table import DOCS, RESULTS, read_rows, table, with_table, write_rows

NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_table_shows_the_results():
    page = (DOCS / "index.md").read_text()
    assert with_table(page) == page, "run: python tests/frameworks/table.py"
    assert len(table().splitlines()) > 2


def test_failure_to_run_or_install_is_a_red_row(tmp_path, monkeypatch):
    monkeypatch.setattr(table_of_docs, "RESULTS", tmp_path)
    described = {"way": "chat", "endpoint": "chat", "streaming": True, "notes": ""}
    failed = {**described, "failed": "KeyError: 'content'"}
    proven = {**described, "way": "sync", "streaming": False, "calls": 3, "side_calls": 0}
    write_rows("one", "one-sdk", "2.0", [failed, proven])
    write_rows("two", "two-sdk", None, [failed])
    assert table().splitlines()[2:] == [
        "| [one-sdk](one.md) 2.0 | `chat` | chat | yes |  |  |  | 🔴 KeyError: 'content' |",
        "| [one-sdk](one.md) 2.0 | `sync` | chat |  | 3 |  |  |  |",
        "| [two-sdk](two.md) not installed | `chat` | chat | yes |  |  |  | 🔴 KeyError: 'content' |",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_code_of_the_example(name):
    sources = [path.read_text() for path in (EXAMPLES / name).glob("*.py")]
    blocks = CODE.findall((DOCS / f"{name}.md").read_text())
    assert blocks
    assert [block for block in blocks if not any(block in source for source in sources)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_was_run_and_none_is_left_over(name):
    tried = import_module(f"{__package__}.test_{name.replace('-', '_')}")
    assert [row["way"] for row in read_rows(name)] == [str(variant) for variant in tried.VARIANTS]
    assert [row["way"] for row in read_rows(name) if "failed" in row] == []


def test_every_example_is_tested():
    examples = {path.parent.name for path in EXAMPLES.glob("*/agent.py")}
    tests = {path.stem.removeprefix("test_").replace("_", "-") for path in Path(__file__).parent.glob("test_*.py")}
    assert examples - {name for name in examples if name in tests} == set()


@pytest.mark.docs
def test_command_in_the_examples_readme_captures_an_agent(tmp_path):
    [command] = re.findall(r"^rllm (run .*)$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    calls = [{"tool_calls": [{"name": "price", "arguments": arguments}]} for arguments in ARGUMENTS]
    with ScriptedServer(ScriptedEngine([*calls, sentence("", TOTAL)])) as server:
        here = command.replace("http://127.0.0.1:8000/v1", server.base_url).replace("-- python", f"-- {sys.executable}")
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in here.split()]
        done = subprocess.run(
            [sys.executable, "-m", "rllm", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert TOTAL in done.stdout
    assert "3 calls" in done.stderr
