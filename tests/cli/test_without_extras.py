"""What the commands say where rllm is installed by itself, without what training needs."""

import re
import subprocess
import sys

import pytest

BARE = """
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "transformers", "peft", "safetensors", "jinja2", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
"""


def bare(program, *arguments, cwd):
    """Run a program as if the extra `train` were not installed."""
    command = [sys.executable, "-c", BARE + program, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "train my_agent.py:agent --data tasks.jsonl --model any",
        "train my_agent.py:agent --data tasks.jsonl --model any --dry-run",
        "sft chats.jsonl --model any",
        "eval my_agent.py:agent --data tasks.jsonl --model any",
        "serve any",
        "export runs",
        "config",
        "config --json-schema",
        "config rllm.yaml",
    ],
)
def test_a_command_that_needs_more_says_how_to_get_it(work, command):
    (work / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (work / "rllm.yaml").write_text("optim:\n  lr: 1.0e-5\n")
    done = bare("from rllm.cli import main; main()", *command.split(), cwd=work)
    assert done.returncode == 1
    *loading, failure = done.stderr.split("\n")[:-1]
    assert re.fullmatch(r"rllm: .*which is not installed: pip install 'rllm\[train\]'", failure), done.stderr
    assert not loading or loading[0].startswith("loading ")


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from rllm import AgentTrainer", "rllm.AgentTrainer"),
        ("from rllm.trainer import AgentSFTTrainer", "rllm.trainer.AgentSFTTrainer"),
    ],
)
def test_so_does_a_public_name(tmp_path, statement, name):
    told = bare(statement, cwd=tmp_path).stderr.splitlines()[-1]
    assert told.endswith(f"{name} needs the package 'torch', which is not installed: pip install 'rllm[train]'")


def test_another_package_that_is_missing_is_not_taken_for_one_of_ours(tmp_path):
    done = bare("from rllm.errors import needed_to_train\nwith needed_to_train('x'): import no_such", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such'"
