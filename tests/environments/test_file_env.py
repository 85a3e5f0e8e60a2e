"""`file:PATH`: the environments that a data file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllm.environments import open_env
from rllm.errors import ConfigError

LAKE = "gymnasium:FrozenLake-v1?size=2&max_steps=3&is_slippery=false"
POLE = "gymnasium:CartPole-v1?size=1&seed=4&max_steps=3"


def written(folder: Path, *rows: object) -> str:
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps(row if isinstance(row, dict) else {"env": row}) + "\n" for row in rows))
    return f"file:{path}"


def test_each_row_yields_the_tasks_of_its_environment(tmp_path: Path) -> None:
    named = open_env(written(tmp_path, LAKE, POLE))
    assert named.tasks.rows_by_source() == {"FrozenLake-v1": [0, 1], "CartPole-v1": [2]}
    assert named.max_steps == 3
    assert named.env_class is not None
    for row, name, num_actions in zip(named.tasks, ["FrozenLake-v1"] * 2 + ["CartPole-v1"], [4, 4, 2], strict=True):
        env = named.env_class.from_dict(json.loads(json.dumps(row)))
        assert env.env.spec.id == name  # type: ignore[attr-defined]
        assert env.env.action_space.n == num_actions  # type: ignore[attr-defined]
        env.reset()
        env.close()


def test_held_out_tasks_may_come_from_another_file(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    trained = open_env(written(tmp_path, LAKE))
    held_out = open_env(written(tmp_path / "other", f"{LAKE}&seed=100"))
    assert trained.env_class is not None
    observation, _ = trained.env_class.from_dict({**held_out.tasks[0], **trained.env_args}).reset()
    assert observation == "0"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([LAKE, {"env": POLE, "weight": 2}], "row 2"),
        ([{"question": "Why?"}], "row 1"),
        ([LAKE, LAKE], "named twice"),
        ([LAKE, "gymnasium:CartPole-v1?max_steps=1"], "max_steps"),
        ([LAKE, "gymnasum:CartPole-v1"], "did you mean 'gymnasium'"),
        (["mcp:python server.py?tasks=tasks.jsonl"], "cannot name files or code"),
        (["tasks:shell?agent=code.py:run"], "cannot name files or code"),
        (["verifiers:os"], "cannot name files or code"),
        (["gymnasium:os:CartPole-v1"], "cannot name files or code"),
        (["file:mixed.jsonl"], "cannot name files or code"),
    ],
)
def test_invalid_rows_are_rejected(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_env(written(tmp_path, *rows))
