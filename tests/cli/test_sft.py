import json
import subprocess
import sys

import pytest

from .conftest import here

FAST = ["num_steps=2", "tasks_per_step=2", "optim.lr=1e-2", "run_dir=run"]


@pytest.fixture
def chats(work):
    """Three conversations in a file."""
    rows = [
        {"messages": [{"role": "user", "content": f"How many {item}?"}, {"role": "assistant", "content": "4"}]}
        for item in ("figs", "limes", "plums")
    ]
    (work / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return work / "chats.jsonl"


def test_model_is_fine_tuned_on_a_file(work, policy, chats):
    from transformers import AutoModelForCausalLM

    done = here("sft", "chats.jsonl", "--val", "chats.jsonl", "--model", policy, "--json", *FAST, cwd=work)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["loss_after"] < outcome["loss_before"]
    assert AutoModelForCausalLM.from_pretrained(work / "run" / "checkpoints" / "step-000002").config.hidden_size == 32
    assert "step 1/2: loss" in done.stderr


def test_dry_run_prints_the_plan(work, policy, chats, monkeypatch, capsys):
    from rllm import cli

    monkeypatch.setattr("sys.argv", ["rllm", "sft", "chats.jsonl", "--model", str(policy), "--dry-run", *FAST])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    printed = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert printed["algorithm.name"][0] == "sft"
    assert printed["rollout.group_size"][0] == "1"
    assert printed["sft.train_on"] == ["all", "default"]
    assert not (work / "run").exists()


@pytest.mark.slow
def test_unreadable_data_is_reported_before_importing_torch(work):
    program = (
        "import sys\nfrom rllm.cli import main\n"
        "sys.argv = ['rllm', 'sft', 'nowhere.jsonl']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "DATA: 'nowhere.jsonl': no such file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chats.jsonl"], "model.path is not set"),
        (["none.jsonl"], "'none.jsonl': no such file"),
        (["tasks.jsonl"], "rllm: DATA: row 0: messages=None"),
        (["chats.jsonl", "--val", "tasks.jsonl"], "rllm: --val: row 0: messages=None"),
        (["chats.jsonl", "keep_best=eval/loss"], "keeps the checkpoint with the highest value"),
        (["chats.jsonl", "keep_best=-eval/loss"], "give held-out tasks (--val)"),
        (["chats.jsonl", "rollout.group_size=4"], "rollout.group_size=4"),
        (["chats.jsonl", "sft.train_onn=last"], "sft.train_onn is not a setting; did you mean 'sft.train_on'?"),
        (["chats.jsonl", "algorithm.name=grpo"], "algorithm.name=grpo learns from rollouts"),
        (["chats.jsonl", "sft.reward_threshold=2"], "sft.reward_threshold needs rewards"),
    ],
)
def test_invalid_settings_are_reported_before_anything_starts(work, policy, chats, fails, arguments, message):
    model = [] if message.startswith("model.path") else ["--model", str(policy)]
    code, errors = fails("sft", *arguments, *model)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
