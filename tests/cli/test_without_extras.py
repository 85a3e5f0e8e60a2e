"""Errors of commands if rllm is installed without the packages for training."""

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


COMMANDS = [
    "demo",
    "train my_agent.py:agent --data tasks.jsonl --model any",
    "sft chats.jsonl --model any",
    "eval my_agent.py:agent --data tasks.jsonl --model any",
    "serve any",
    "export runs",
    "config",
]
EACH = """
from rllm.cli import main
for command in sys.argv[1:]:
    sys.argv = ["rllm", *command.split()]
    try:
        main()
    except SystemExit as ended:
        print(f"exit code {ended.code}", file=sys.stderr)
"""


@pytest.mark.slow
def test_commands_with_missing_packages_name_the_extra(work):
    (work / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    done = bare(EACH, *COMMANDS, cwd=work)
    *printed, rest = done.stderr.split("exit code 1\n")
    assert (len(printed), rest) == (len(COMMANDS), ""), done.stderr
    for command, text in zip(COMMANDS, printed, strict=True):
        *loading, failure = text.splitlines()
        assert re.fullmatch(r"rllm: .*which is not installed: pip install 'rllm\[train\]'", failure), command
        assert not loading or loading[0].startswith("loading ")


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from rllm import AgentTrainer", "rllm.AgentTrainer"),
        ("from rllm.trainer import AgentSFTTrainer", "rllm.trainer.AgentSFTTrainer"),
    ],
)
def test_public_names_with_missing_packages_name_the_extra(tmp_path, statement, name):
    printed = bare(statement, cwd=tmp_path).stderr.splitlines()[-1]
    assert printed.endswith(f"{name} needs the package 'torch', which is not installed: pip install 'rllm[train]'")


def test_unrelated_missing_package_is_not_attributed_to_an_extra(tmp_path):
    done = bare("from rllm.errors import needed_to_train\nwith needed_to_train('x'): import no_such", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such'"
