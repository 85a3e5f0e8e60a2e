from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from rllm.tasks.shell_tasks import shell_tasks

from ..sandbox.conftest import backend_or_skip


def test_demonstrations_know_the_command_of_every_task(example: Callable[[str, str], Any]) -> None:
    offline = example("shell_tasks", "offline")
    for task in shell_tasks(40, seed=0):
        command = offline._filled_in(offline.COMMANDS[task.kind], task.instruction, random.Random(0))
        assert command == task.command, json.dumps(task.instruction)


@pytest.mark.examples
def test_policy_learns_the_requested_command(train: Callable[..., list[dict[str, Any]]]) -> None:
    backend_or_skip("local")
    first, *_, last = train("shell_tasks", "num_steps=12")
    assert first["eval/accuracy"] <= 0.3
    assert last["eval/accuracy"] >= 0.7
