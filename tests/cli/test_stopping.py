"""Commands that are stopped; signals come from this process."""

import asyncio
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from rllm.cli import terminal
from rllm.cli.terminal import CTRL_C, print_stopped, saved_state, signals_like_ctrl_c
from rllm.trainer.checkpoint import Checkpoints

from .conftest import here

ENDED_BY_ITS_AGENT = """
import itertools, os, signal
from openai import OpenAI

calls = itertools.count()


def agent(question, answer):
    with OpenAI() as client:  # closed here, since no other code knows when the run has ended
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}], max_tokens=4)
    if next(calls) == 0:  # a second signal could come after its handler is removed, and end the tests
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0
"""


@pytest.fixture(autouse=True)
def default_signal_handlers():
    """Use Python's own handlers: a shell may have started the tests with ignored signals, as nohup does."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def work_until(saved, signals):
    try:
        for number in signals:
            signal.raise_signal(number)  # in this thread: earlier tests may have left other threads
        await asyncio.sleep(60)
    finally:
        saved.append("the last step")


def command(number, saved, *before):
    with signals_like_ctrl_c():
        try:
            asyncio.run(work_until(saved, [*before, number]))
        except KeyboardInterrupt:
            sys.exit(CTRL_C)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_stops_cleanly_and_sets_the_exit_code(number, code):
    saved, before = [], signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        command(number, saved)
    assert (ended.value.code, saved) == (code, ["the last step"])
    assert signal.getsignal(number) == before


INTERRUPTED_WHILE_IMPORTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from rllm.__main__ import main
main()
"""


def test_ctrl_c_during_imports_prints_no_traceback():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("also", [[], [signal.SIGINT]], ids=["SIGTERM", "SIGTERM after an ignored Ctrl-C"])
def test_work_ends_cleanly_if_ctrl_c_is_ignored(also):
    saved, before = [], signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            command(signal.SIGTERM, saved, *also)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.value.code, saved) == (143, ["the last step"])


def sleeping(began):
    began.set()
    time.sleep(600)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_process_of_an_agent_can_be_terminated():
    async def rollout():
        forks = multiprocessing.get_context("fork")
        began = forks.Event()
        process = forks.Process(target=sleeping, args=(began,))
        process.start()
        began.wait(60)
        process.terminate()
        process.join(30)
        code = process.exitcode
        process.kill()
        return code

    with signals_like_ctrl_c():
        assert asyncio.run(rollout()) == -signal.SIGTERM


def test_run_stopped_before_its_first_step_reports_its_state(work, policy):
    (work / "my_agent.py").write_text(ENDED_BY_ITS_AGENT)
    small = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=2", "eval.at_start=false", "run_dir=run"]
    done = here("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", policy, *small, cwd=work)
    assert done.returncode == 143
    printed = done.stderr.splitlines()
    assert printed[-2] == "Stopped. No step is saved, so nothing is learned; run keeps its settings."
    assert printed[-1].startswith("Resume with: ")
    again = shlex.split(printed[-1].partition("rllm ")[2])
    (work / "my_agent.py").write_text(ENDED_BY_ITS_AGENT.replace("== 0", "< 0"))
    done = here(*again, cwd=work)
    assert done.returncode == 0, done.stderr
    assert (work / "run" / "checkpoints" / "step-000001").is_dir()


def test_run_stopped_before_it_started_is_reported(tmp_path, capsys):
    print_stopped(terminal.console(), tmp_path / "run", ["train"], num_steps=1)
    message = "\nStopped. The run had not started, so there is nothing to keep; run the same command again.\n"
    assert capsys.readouterr().out == message


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (
            None,
            "No step is saved, so nothing is learned; run keeps its settings.\nResume with: rllm train --resume run",
        ),
        (
            {"step": 0, "evaluated_at": 0},
            "No step is saved, so nothing is learned; run keeps its settings and first evaluation.\n"
            "Resume with: rllm train --resume run",
        ),
        (
            {"step": 3, "evaluated_at": 2},
            "3 of 3 steps are saved in run; later work is repeated.\nResume with: rllm train --resume run",
        ),
        ({"step": 3, "evaluated_at": 3}, "Everything is done and saved in run."),
    ],
    ids=["steps that were not saved", "an evaluation", "all but the last evaluation", "all"],
)
def test_report_after_stopping_matches_the_saved_state(tmp_path, monkeypatch, saved, expected):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("num_steps: 3\n")
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "rollout/rew')
    if saved is not None:
        Checkpoints(run, keep=1).save(saved["step"], lambda folder: None, saved)
    assert saved_state(run, ["train", "--resume", "run"], num_steps=3) == expected
