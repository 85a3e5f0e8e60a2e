import json
import os
import random

import pytest

from rllm.cli.display import trend
from rllm.demo import tasks
from rllm.tracking.about import seal

from .conftest import rllm


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path, seed):
    """As the README promises: from at most 45 % of the held-out tasks to at least 90 %."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = rllm("demo", "--seed", seed, "--json", cwd=tmp_path, timeout=3600, env=environment)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert 0.1 <= outcome["accuracy_before"] <= 0.45
    assert outcome["accuracy_after"] >= 0.9
    run = tmp_path / outcome["run_dir"]
    assert {path.name for path in run.iterdir()} >= {"metrics.jsonl", "traces.db", "checkpoints", "config.yaml"}


def test_a_run_keeps_its_seed(work, fails):
    (work / "run").mkdir()
    (work / "run" / "config.yaml").write_text("seed: 3\n")
    seal(work / "run")
    code, errors = fails("demo", "--resume", "run", "--seed", "4")
    assert (code, "--seed 4" in errors) == (2, True)


def test_tasks_follow_from_the_seed_and_can_only_be_looked_up():
    [task] = tasks.shop_tasks(1, seed=3)
    assert [task] == tasks.shop_tasks(1, seed=3)
    assert [task] != tasks.shop_tasks(1, seed=4)
    item = next(item for item in task["prices"] if f'"{item}"' in task["question"].rsplit(". ", 1)[-1])
    assert task["answer"] in (task["prices"][item], task["stock"][item])
    answers = {task["answer"] for task in tasks.shop_tasks(300, seed=0)}
    assert len(answers) > 60


@pytest.mark.parametrize(("clerk", "expected"), [(tasks.CAREFUL, 1.0), (tasks.SLOPPY, 0.36 * 0.9 * 0.97)])
def test_a_clerk_is_right_as_often_as_it_says(clerk, expected):
    rng = random.Random(0)
    rows = tasks.shop_tasks(2000, seed=1)
    said = [tasks._conversation(row, clerk, "", rng)[-1]["content"] for row in rows]
    right = sum(text == str(row["answer"]) for text, row in zip(said, rows, strict=True)) / len(rows)
    assert right == pytest.approx(expected, abs=0.03)


def test_the_agent_is_paid_for_the_right_number_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    from rllm.demo.agent import look_up

    shelves = {"price": {"fig": 12}, "stock": {"fig": 34}}
    assert look_up(shelves, "price", '{"item": "fig"}') == "12"
    assert look_up(shelves, "price", '{"item": "rope"}') == "error: KeyError"
    assert look_up(shelves, "weight", '{"item": "fig"}') == "error: KeyError"
    assert look_up(shelves, "price", '{"item"') == "error: JSONDecodeError"
    assert look_up(shelves, "price", "[]") == "error: TypeError"


def test_a_trend_is_a_line_of_bars():
    assert trend([0.0, 0.5, 1.0]) == "▁▅█"
    assert trend([0.3]) == "▁"
