"""Resuming a run: the stored arguments of its command, and new ones."""

import os

import pytest

from rllm.cli.options import RunOptions, leading_setting
from rllm.cli.training import begun_as
from rllm.errors import ConfigError
from rllm.tracking.about import keep_beginning, seal


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("num_steps: 2\n")
    keep_beginning(
        run,
        {"command": "train", "agent": "a.py:f", "data": ["shop"], "split": "train", "val": "shop", "val_split": "test"},
    )
    seal(run)
    return run


def test_run_is_resumed_as_it_was_started(run):
    assert begun_as("train", RunOptions(resume=run), agent=None, data=None) == {
        "command": "train", "agent": "a.py:f", "data": ["shop"], "split": "train", "val": "shop", "val_split": "test",
    }  # fmt: skip


def test_given_options_replace_those_of_the_run(run):
    begun = begun_as("train", RunOptions(resume=run), agent="b.py:g", data=["tasks.jsonl"])
    assert begun == {
        "command": "train", "agent": "b.py:g", "data": ["tasks.jsonl"], "val": "shop", "val_split": "test",
    }  # fmt: skip


def test_new_run_uses_only_given_options():
    assert begun_as("sft", RunOptions(), data="chats.jsonl") == {
        "command": "sft",
        "data": "chats.jsonl",
    }


def test_run_of_another_command_is_rejected(run):
    with pytest.raises(ConfigError, match=r"the run was started by rllm train: use rllm train --resume .*run"):
        begun_as("sft", RunOptions(resume=run))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ((None, None), (None, [])),
        (("a.py:f", ["optim.lr=1"]), ("a.py:f", ["optim.lr=1"])),
        (("optim.lr=1", ["seed=2"]), (None, ["optim.lr=1", "seed=2"])),
        (("+algorithm.x=1", None), (None, ["+algorithm.x=1"])),
        (("shop/a=b.jsonl", None), ("shop/a=b.jsonl", [])),
    ],
)
def test_settings_may_replace_the_agent_argument(typed, meant):
    first, settings = typed
    assert leading_setting(first, settings) == meant


@pytest.mark.parametrize("argument", ["lr=1/agent.py:run", "lr=1/agent.py"])
def test_path_that_looks_like_a_setting_is_an_agent(work, argument):
    (work / "lr=1").mkdir()
    (work / "lr=1" / "agent.py").touch()
    assert leading_setting(argument, ["seed=2"]) == (argument, ["seed=2"])


def test_run_not_started_by_a_command_needs_an_agent(work, fails):
    (work / "run").mkdir()
    (work / "run" / "config.yaml").write_text("num_steps: 2\n")
    seal(work / "run")
    code, errors = fails("train", "--resume", "run")
    assert code == 2
    assert errors.startswith("rllm: --resume run: the run was not started by a command, so arguments are missing")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["train", "--resume", "nowhere"],
            "--resume nowhere: there is no run (no config.yaml); there are no runs in",
        ),
        (
            ["train", "a.py:f", "--data", "d.jsonl", "--val-split", "test"],
            "--val-split test: there is no held-out data",
        ),
        (["sft", "num_steps=1"], "DATA is missing"),
        (["train", "num_steps=1"], "the agent is missing: rllm train FILE.py:function"),
    ],
)
def test_missing_arguments_are_reported(work, fails, arguments, expected):
    code, errors = fails(*arguments)
    assert (code, errors.startswith(f"rllm: {expected}")) == (2, True), errors


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["second"], "--resume second: there is no run (no config.yaml); {}runs/second"),
        (["runs/secnod"], "--resume runs/secnod: there is no run (no config.yaml); {}runs/second"),
        (["absent"], "--resume absent: there is no run (no config.yaml); {}runs/first"),
    ],
)
def test_missing_run_error_lists_the_runs(work, fails, named, expected):
    for age, name in enumerate(["first", "second"]):
        (work / "runs" / name).mkdir(parents=True)
        (work / "runs" / name / "config.yaml").touch()
        os.utime(work / "runs" / name / "config.yaml", (1e9 - age, 1e9 - age))
    there = f"runs in {work / 'runs'}: first, second; name one by its path, such as "
    assert fails("train", "--resume", *named) == (2, f"rllm: {expected.format(there)}\n")


def test_damaged_run_file_is_reported(run):
    (run / "begun_as.yaml").write_text("command: train\n data: x\n")
    with pytest.raises(ConfigError, match=r"begun_as.yaml, line 2, column 6 is not valid YAML"):
        begun_as("train", RunOptions(resume=run))
