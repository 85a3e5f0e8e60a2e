"""The display of a running training."""

from __future__ import annotations

import io
import math
import sys

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


def shown_after(tmp_path, during, *, under_way=None, **options) -> str:
    """Return what a display has printed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    settings = {"num_steps": 4, "log_samples": 1}
    display = LiveDisplay(console, tmp_path, settings, lambda: under_way or UnderWay(), **options)
    try:
        during(display)
        display._live.refresh()
    finally:
        display.close()
    return out.getvalue()


def test_lines_are_printed_above_a_bar_that_shows_what_is_under_way(tmp_path):
    def advance(display):
        episode = Episode(id="figs:0", trajectories=[Trajectory(reward=0.25, steps=[Step(response_ids=[1, 2])])])
        display.log_rollout("roll out", episode)
        display.progress("roll out", 1, 2)
        display._live.refresh()
        sys.stderr.write("a warning\n")
        display.log(1, {"rollout/reward": 0.5, "timing/step_s": 3.0, "timing/rollout_s": 3.0})
        display.log_episodes(1, "train", [episode])
        display.log(2, {"rollout/reward": math.nan})

    shown = shown_after(tmp_path, advance, clock=Clock())
    assert f"Run folder: {tmp_path}" in shown
    assert "rollouts 1/2, 2 tokens, reward 0.250 so far, 0 s" in shown
    assert "step 1/4: reward 0.500, 3.0 s (rollouts 3.0 s), 9 s left" in shown
    assert "step 2/4: reward nan" in shown
    assert "sample figs:0: reward 0.250" in shown
    assert "a warning" in shown
    assert "2/4" in shown
    assert "stopped at step 2" in shown


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


def test_running_and_stuck_rollouts_are_shown(tmp_path):
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

    shown = shown_after(tmp_path, advance, under_way=under_way, clock=clock)
    assert "rollouts 4/6, 40 s; 2 running; figs:0 stuck for 40 s; [/figs]:1 stuck for 40 s" in shown
