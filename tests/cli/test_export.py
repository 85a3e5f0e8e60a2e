"""`rllm rescore` and `rllm export` of a real run with an adapter."""

from __future__ import annotations

import json

import pytest
import torch

from .conftest import AGENT, here

JUDGE = """
def reward(task, answer):
    return float(len(task["question"]) + len(answer))
"""


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory):
    """A run's folder, inside of the agent's directory."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "my_agent.py").write_text(AGENT)
    (folder / "judge.py").write_text(JUDGE)
    rows = [{"question": f"How many {item}?", "answer": "4"} for item in ("figs", "limes")]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = here(
        "train", "my_agent.py:agent", "--data", "tasks.jsonl", "--val", "tasks.jsonl", "--model", policy, "num_steps=1",
        "tasks_per_step=2", "rollout.group_size=4", "run_dir=run", "model.lora_rank=2", "eval.at_start=false", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_rescoring_reports_changed_rewards(run):
    before = (run / "traces.db").read_bytes()
    done = here("rescore", "run", "--reward", "judge.py:reward", "--json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert output["num_trajectories"] == 2 * 4 + 2
    lines = [json.loads(line) for line in (run.parent / output["file"]).read_text().splitlines()]
    questions = {"0": len("How many figs?"), "1": len("How many limes?")}
    assert [line["after"] for line in lines] == [
        float(questions[line["episode_id"][0]] + len(line["answer"])) for line in lines
    ]
    assert output["mean_after"] == pytest.approx(sum(line["after"] for line in lines) / len(lines))
    assert "10 of 10 rewards change" in done.stderr
    assert (run / "traces.db").read_bytes() == before
    here("export", "run", "--rewards", output["file"], "--chat", "new.jsonl", cwd=run.parent)
    assert [json.loads(line)["reward"] for line in (run.parent / "new.jsonl").read_text().splitlines()] == [
        line["after"] for line in lines
    ]


def test_missing_tasks_file_error_names_the_remedy(run):
    kept = (run / "tasks.jsonl").rename(run / "lost.jsonl")
    try:
        arguments = ["rescore", "run", "--reward", "judge.py:reward", "--data", "tasks.jsonl"]
        done = here(*arguments, cwd=run.parent)
        assert done.returncode == 2
        assert "has no task, since its folder has no tasks.jsonl" in done.stderr
        assert "name the tasks of the run with --val" in done.stderr
        assert "of 10 rewards change" in here(*arguments, "--val", "tasks.jsonl", cwd=run.parent).stdout
    finally:
        kept.rename(run / "tasks.jsonl")


def test_conversations_are_exported_for_sft(run, policy):
    assert here("export", "run", "--chat", "chat.jsonl", "--split", "train", cwd=run.parent).stdout == (
        "8 conversations written to chat.jsonl\n"
    )
    done = here(
        "sft", "chat.jsonl", "--model", policy, "num_steps=1", "tasks_per_step=8", "run_dir=sft", cwd=run.parent
    )
    assert done.returncode == 0, done.stderr


def test_merged_model_generates_the_same_as_the_adapter(run):
    from transformers import AutoModelForCausalLM

    from rllm.inference.local.loading import load_model

    done = here("export", "run", "--model", "merged", "--adapter", "adapter", "--episodes", "e.jsonl", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (run.parent / "adapter").glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(run.parent / "merged")(ids).logits
        adapted = load_model(run.parent / "adapter", device="cpu").model(ids).logits
    assert torch.equal(merged, adapted)
    assert len((run.parent / "e.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["export", "run"], "nothing to write"),
        (["export", "run", "--model", "m", "--rewards", "new.jsonl"], "--rewards new.jsonl would have no effect"),
        (["export", "run", "--model", "m", "--min-reward", "1"], "--min-reward 1.0 would have no effect"),
        (["export", "run", "--model", "m", "--split", "eval"], "--split eval would have no effect"),
        (["export", "run", "--chat", "c.jsonl", "--checkpoint", "best"], "--checkpoint best would have no effect"),
        (["export", ".", "--episodes", "e.jsonl"], "is not the folder of a run or evaluation; did you mean"),
        (["export", "nowhere", "--episodes", "e.jsonl"], "no such folder"),
        (["rescore", "judge.py", "--reward", "judge.py:reward"], "run='judge.py': it is a file; use the folder of"),
        (["rescore", "run", "--reward", "nowhere.py:reward"], "reward file"),
        (["rescore", "run", "--reward", "judge.py:rewrad"], "defines no 'rewrad'; it has reward"),
        (
            ["rescore", "run", "--reward", "my_agent.py:OpenAI"],
            "reward='my_agent.py:OpenAI' is a class, not a function",
        ),
    ],
)
def test_errors_name_the_mistake(run, arguments, expected):
    done = here(*arguments, cwd=run.parent)
    assert done.returncode == 2
    assert expected in done.stderr


def test_reward_in_a_file_with_a_client_needs_no_key(run, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (run.parent / "both.py").write_text(AGENT + JUDGE)
    done = here("rescore", "run", "--reward", "both.py:reward", cwd=run.parent)
    assert done.returncode == 0, done.stderr


def test_reward_that_always_raises_fails_the_command(run):
    (run.parent / "broken.py").write_text("def reward(task, answer):\n    raise ValueError('no idea')\n")
    done = here("rescore", "run", "--reward", "broken.py:reward", cwd=run.parent)
    assert done.returncode == 1
    assert "broken.py:reward raised for all" in done.stderr
    assert "no idea" in done.stderr
