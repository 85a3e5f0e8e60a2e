"""The display of a running training."""

from __future__ import annotations

import io
import logging
import math

import yaml
from rich.console import Console

from rllm.cli.display import LiveDisplay
from rllm.cli.training import display
from rllm.engine.event_loop import UnderWay
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types import Episode, Step, Trajectory

from .conftest import here


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown_after(*, under_way: UnderWay, during, **options) -> str:
    """Return the last picture of a display."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    display = LiveDisplay(console, 4, lambda: under_way, **options)
    try:
        during(display)
        display._live.refresh()
    finally:
        display.close()
    return out.getvalue()


def test_display_shows_reward_accuracy_speed_and_time_shares():
    def advance(display):
        display.log(1, {"rollout/reward": 0.25, "tokens/per_second": 1234.0})
        display.log(
            2, {"rollout/reward": 0.5, "timing/rollout_s": 3.0, "timing/update_s": 1.25, "timing/publish_s": 0.01}
        )
        display.log(2, {"eval/accuracy": 0.75})

    shown = shown_after(under_way=UnderWay(), during=advance)
    assert "0.500  ▁█" in shown
    assert "75% (step 2)" in shown
    assert "1,234 tokens/s" in shown
    assert "rollouts 3.0 s, update 1.2 s" in shown
    assert "2/4" in shown
    assert "stopped at step 2" in shown


def test_non_finite_loss_leaves_a_gap():
    shown = shown_after(
        under_way=UnderWay(),
        during=lambda display: [
            display.log(step, {"policy/nll": loss})
            for step, loss in enumerate((2.0, math.nan, 1.0, math.inf, math.nan), 1)
        ],
    )
    assert "nan  █ ▁" in shown


def test_resumed_run_starts_the_display_at_its_step(work, policy):
    begun = ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model", policy]
    assert here(*begun, "num_steps=1", "rollout.group_size=2", "run_dir=run", cwd=work).returncode == 0
    trainer = AgentTrainer(
        agent_run_func=lambda question, answer: 0.0,
        train_dataset="tasks.jsonl",
        config={**yaml.safe_load((work / "run" / "config.yaml").read_text()), "num_steps": 3, "run_dir": "run"},
        resume=True,
    )
    out = io.StringIO()
    (shown,) = display(Console(file=out, force_terminal=True, width=100, color_system=None), trainer)
    shown.close()
    assert "1/3" in out.getvalue()
    assert "stopped at step 1" in out.getvalue()


def test_running_and_stuck_rollouts_are_shown():
    clock = Clock()
    under_way = UnderWay(clock)

    def advance(display):
        display.progress("roll out", 4, 6)
        with under_way.one("figs:0"), under_way.one("[/figs]:1"):
            for _ in range(4):
                with under_way.one("limes:0"):
                    clock.now += 1.0
            clock.now = 40.0
            display._live.refresh()

    shown = shown_after(under_way=under_way, during=advance, clock=clock)
    assert "rollouts 4/6, 40 s; 2 running; figs:0 stuck for 40 s; [/figs]:1 stuck for 40 s" in shown


def test_overview_of_a_run():
    def advance(display):
        episode = Episode(id="figs:0", trajectories=[Trajectory(reward=0.25, steps=[Step(response_ids=[1, 2])])])
        display.log(
            0, {"eval/reward": 0.125, "eval/accuracy": 0.0, "eval/reward/[solver]": 0.5, "eval/agent/tools": 1.0}
        )
        display.log_rollout("roll out", episode)
        display.progress("roll out", 1, 2)
        display._live.refresh()
        display.log(
            1, {"rollout/reward": 0.25, "rollout/accuracy": 0.5, "rollout/truncated": 0.3, "rollout/num_failed": 1.0}
        )
        display.log(
            1, {"rollout/reward/[solver]": 0.75, "agent/tools": 2.0, "memory/peak_gb": 2.0, "tokens/per_second": 9.0}
        )
        display.log_episodes(1, "train", [episode])

    shown = shown_after(under_way=UnderWay(), during=advance, log_samples=1, clock=Clock())
    for row in (
        ("held-out reward", "0.125 (step 0)"),
        ("rollouts", "accuracy 50.0%, cut 30%, failed 1"),
        ("roles", "[solver] 0.750; held out: [solver] 0.500"),
        ("reported", "tools 2; held out: tools 1"),
        ("speed", "9 tokens/s, memory 2.0 GB"),
        ("now", "rollouts 1/2, 2 tokens, reward 0.250 so far, 0 s"),
    ):
        assert any(line.split(maxsplit=row[0].count(" ") + 1)[-1].strip() == row[1] for line in shown.splitlines()), row
    assert "sample figs:0: reward 0.250" in shown


def test_warnings_are_counted_and_printed_above():
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # pytest's own stream would be printed to
    try:
        shown = shown_after(
            under_way=UnderWay(),
            during=lambda display: [
                logging.getLogger("rllm.trainer").warning("step %d, no_variance: so\nmore", n) for n in (1, 2)
            ],
        )
    finally:
        root.handlers = handlers
    assert "2, the last: step 2, no_variance: so" in shown
    assert shown.count("more") == 2
    assert not [handler for handler in logging.getLogger("rllm").handlers if type(handler).__name__ == "_Warnings"]
