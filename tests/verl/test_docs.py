"""The programs of `docs/verl.md`, on two workers of this machine and with a small model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rllm.trainer.config import load_config

from ..trainer.test_scaling_docs import check_command

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).parents[2] / "docs" / "verl.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^rllm train .*", PAGE.replace("\\\n", " "), re.MULTILINE)
SMALL = [
    *("model.device=cpu", "verl.workers_per_node=2", "verl.timeout_s=1800", "run_dir=runs/docs", "num_steps=1"),
    *("tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=4"),
]


def test_page_has_the_programs_tested_here() -> None:
    assert (len(PROGRAMS), len(COMMANDS)) == (1, 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_exist(command: str) -> None:
    check_command(command)


@pytest.mark.parametrize("program", PROGRAMS)
def test_documented_program_trains(
    program: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "4"}\n')
    found = re.search(r"config=(\[.*\])", program)
    assert found is not None
    load_config(re.findall(r'"(.+?)"', found[1]))
    exec(program.replace(found[1], repr([f"model.path={model_folder}", *SMALL])), {})
    assert Path("runs/docs/checkpoints/step-000001/config.json").exists()
