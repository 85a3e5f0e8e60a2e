"""docs/vllm.md names existing settings and commands."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest
from typer.main import get_command

from rllm.cli import app
from rllm.inference.servers.command import ServeOptions, serve_arguments
from rllm.trainer.config import TrainConfig, load_config

TEXT = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
EVERYTHING = ServeOptions(
    model="m",
    port=1,
    max_length=1,
    reasoning_parser="qwen3",
    lora_rank=1,
    sleeps=True,
)
COMMANDS = re.findall(r"^rllm .*", TEXT, re.MULTILINE)


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"`((?!vllm\.log)(?:vllm|model|rollout)\.\w+)`", TEXT))))
def test_documented_settings_exist(setting: str) -> None:
    attrgetter(setting)(TrainConfig())


def test_server_settings_are_documented() -> None:
    assert [name for name in type(TrainConfig().vllm).model_fields if f"vllm.{name}" not in TEXT] == []


def test_documented_flags_are_used_to_start_servers() -> None:
    on_gpus, on_cpus = serve_arguments(EVERYTHING), serve_arguments(ServeOptions(model="m", port=1, on_cpu=True))
    ours = {word for word in [*on_gpus, *on_cpus] if word.startswith("--")}
    for row in re.findall(r"^\| `(--[^`]*)` \|", TEXT, re.MULTILINE):
        assert {word for word in row.split() if word.startswith("--")} <= ours, row


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_exist(command: str) -> None:
    _, name, *words = command.split()
    known = get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    load_config([word for word in words if "=" in word])
