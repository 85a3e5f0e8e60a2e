"""The lines of a run, as in a log file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rllm.tracking.base import Trackers
from rllm.tracking.console import ConsoleTracker, LastingConsole
from rllm.types import Episode, Step, Trajectory

STEP = {"rollout/reward": 0.5, "rollout/accuracy": 0.25}
CHAT = [{"role": "user", "content": "A fig?"}, {"role": "assistant", "content": "3"}]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A console tracker that prints to a file, and its clock."""

    def __init__(self, run_dir: Path, settings: str = "num_steps: 63\n") -> None:
        (run_dir / "config.yaml").write_text(settings)
        self.clock = Clock()
        self.out = io.StringIO()
        self.tracker = ConsoleTracker(run_dir, LastingConsole(self.out), clock=self.clock)
        self.take()

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        lines = self.out.getvalue().splitlines()
        self.out.seek(0)
        self.out.truncate()
        return lines

    def after(self, seconds: float) -> list[str]:
        """Return the lines logged this many seconds later."""
        self.clock.now += seconds
        self.tracker.beat()
        return self.take()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def rollout(reward: float | None, *, num_tokens: int = 10, failed: bool = False) -> Episode:
    step = Step(chat_completions=CHAT, response_ids=[1] * num_tokens, logprobs=[-0.1] * num_tokens)
    info = {"error": {"type": "AgentError"}} if failed else {}
    return Episode(id="figs:0", info=info, trajectories=[Trajectory(reward=reward, steps=[step])])


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"rollout/reward": 0.5, "rollout/num_failed": 0.0, "rollout/truncated": 0.0}, "step 4/63: reward 0.500"),
        ({"rollout/reward": 0.0, "rollout/num_failed": 2.0}, "step 4/63: reward 0.000, failed 2"),
        ({"rollout/reward": -1.6e-16, "rollout/num_unscored": 1.0}, "step 4/63: reward 0.000, unscored 1"),
        ({**STEP, "rollout/truncated": 0.24}, "step 4/63: reward 0.500, accuracy 25.0%, cut 24%"),
        ({**STEP, "rollout/truncated": 0.001}, "step 4/63: reward 0.500, accuracy 25.0%, cut <1%"),
        (
            {**STEP, "rollout/reward/solver": 0.25, "rollout/reward/solver_p10": 0.0, "rollout/reward/judge": 0.75},
            "step 4/63: reward 0.500, accuracy 25.0%, solver 0.250, judge 0.750",
        ),
        (
            {**STEP, "agent/tools": 2.125, "format/ok": 1e-17, "rollout/num_calls": 3.0, "timing/env_s": 1.0},
            "step 4/63: reward 0.500, accuracy 25.0%, tools 2.12, format/ok 0",
        ),
        (
            {**STEP, **{f"agent/m{n}": float(n) for n in range(9)}},
            "step 4/63: reward 0.500, accuracy 25.0%, m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, and 3 more in metrics.jsonl",
        ),
        (
            {**STEP, "memory/peak_gb": 2.14, "memory/gpu_peak_gb": 33.0},
            "step 4/63: reward 0.500, accuracy 25.0%, memory 2.1 GB, GPU memory 33.0 GB",
        ),
        (
            {
                "eval/reward": 0.5,
                "eval/accuracy": 0.25,
                "eval/num_failed": 1.0,
                "timing/eval_s": 3.0,
                "val/pass@1": 0.2,
            },
            "step 4/63, held out: reward 0.500, accuracy 25.0%, failed 1, 3.0 s",
        ),
        (
            {
                "eval/reward": 0.5,
                "eval/truncated": 0.5,
                "eval/reward/solver": 1.0,
                "eval/agent/tools": 2.0,
                "eval/x/y": 1.0,
            },
            "step 4/63, held out: reward 0.500, cut 50%, solver 1.000, tools 2, x/y 1",
        ),
        ({"policy/nll": 1.25, "optim/lr": 1e-4}, "step 4/63: loss 1.250"),
        ({"eval/loss": 1.25}, "step 4/63, held out: loss 1.250"),
        ({"policy/loss": 1.0}, None),
    ],
)
def test_metrics_become_a_line(log: Log, metrics: Mapping[str, float], line: str | None) -> None:
    log.tracker.log(4, metrics)
    assert log.take() == ([] if line is None else [line])


def test_training_and_evaluation_in_one_call_are_two_lines(log: Log) -> None:
    log.tracker.log(4, {**STEP, "eval/accuracy": 1.0})
    assert log.take() == ["step 4/63, held out: accuracy 100.0%", "step 4/63: reward 0.500, accuracy 25.0%"]


def test_line_has_reward_timings_and_time_left(log: Log) -> None:
    timing = {"timing/rollout_s": 2.0, "timing/update_s": 0.5, "timing/step_s": 3.0}
    for step, reward in enumerate([0.25, 0.75, 1.0], start=1):
        log.tracker.log(step, {"rollout/reward": reward, **timing})
    log.tracker.log(3, {"eval/reward": 0.5})
    log.tracker.log(4, {"eval/reward": 0.25})
    assert log.take()[1:] == [
        "step 2/63: reward 0.750, 3.0 s (rollouts 2.0 s, update 0.5 s), 3 min left",
        "step 3/63: reward 1.000 (+0.500), 3.0 s (rollouts 2.0 s, update 0.5 s), 3 min left",
        "step 3/63, held out: reward 0.500",
        "step 4/63, held out: reward 0.250 (-0.250)",
    ]


@pytest.mark.parametrize(
    ("phase", "step", "name"), [("evaluate", 0, "evaluation"), ("roll out", 1, "rollouts"), ("update", 1, "update")]
)
def test_slow_phase_logs_its_progress(log: Log, phase: str, step: int, name: str) -> None:
    trackers = Trackers([log.tracker])
    total = 1 if phase == "update" else 100
    trackers.progress(phase, 0, total)
    assert log.after(19.0) == []
    of = "" if total == 1 else " 0/100"
    assert log.after(1.0) == [f"step {step}/63: {name}{of}, 20 s"]
    assert log.after(10.0) == []
    if total > 1:
        for done, episode in enumerate([rollout(1.0), rollout(0.0), rollout(None), rollout(1.0, failed=True)], start=1):
            trackers.progress(phase, done, total, episode)
        assert log.after(10.0) == [f"step {step}/63: {name} 4/100, 40 tokens, reward 0.500 so far, 40 s"]


def test_finished_or_quick_phase_logs_no_progress(log: Log) -> None:
    trackers = Trackers([log.tracker])
    assert log.after(1000.0) == [], "before anything begins"
    for step in (1, 2):
        trackers.progress("roll out", 0, 2)
        assert log.after(15.0) == []
        trackers.progress("update", 0, 1)
        assert log.after(15.0) == []
        trackers.log(step, STEP)
        assert log.take() == [f"step {step}/63: reward 0.500, accuracy 25.0%"]
    assert log.after(1000.0) == [], "between phases"
    trackers.progress("save", 0, 1)
    assert log.after(30.0) == ["step 2/63: checkpoint, 30 s"]
    trackers.progress("roll out", 0, 2)
    assert log.after(30.0) == ["step 3/63: rollouts 0/2, 30 s"], "the next step, with a new clock"


def test_progress_of_a_resumed_run_continues_its_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    log = Log(tmp_path)
    log.tracker.progress("roll out", 0, 2)
    assert log.after(20.0) == ["step 8/63: rollouts 0/2, 20 s"]
    log.tracker.close()
    log.tracker.close()


def test_tracker_without_log_rollout_gets_the_other_calls() -> None:
    received = []

    class Plain:
        def progress(self, *args: object) -> None:
            received.append(args)

    Trackers([Plain()]).progress("roll out", 1, 2, rollout(1.0))  # type: ignore[list-item]
    assert received == [("roll out", 1, 2)]


@pytest.mark.parametrize(("split", "shown"), [("train", {1, 10, 20}), ("eval", {0})], ids=["training", "evaluation"])
def test_sample_conversations_are_printed_every_few_steps(log: Log, split: str, shown: set[int]) -> None:
    printed = set()
    for step in range(split == "train", 22):
        log.tracker.log_episodes(step, split, [rollout(1.0), rollout(0.0), rollout(0.5)])
        lines = log.take()
        if lines:
            printed.add(step)
            assert [line for line in lines if "sample" in line] == [
                "  sample figs:0: reward 0.000, wrong",
                "  sample figs:0: reward 1.000, wrong",
            ]
    assert printed == shown


@pytest.mark.parametrize(("number", "rewards"), [(0, []), (1, ["0.500"]), (3, ["0.000", "0.500", "1.000"])])
def test_number_of_samples_is_configurable(tmp_path: Path, number: int, rewards: list[str]) -> None:
    log = Log(tmp_path, f"log_samples: {number}\n")
    log.tracker.log_episodes(1, "train", [rollout(1.0), rollout(0.0), rollout(0.5)])
    assert [line.split()[3].rstrip(",") for line in log.take() if "sample" in line] == rewards


def excerpt(log: Log, *messages: Mapping[str, object], **about: object) -> list[str]:
    step = Step(chat_completions=list(messages), finish_reason="length")  # type: ignore[arg-type]
    episode = Episode(id="figs:0", **about, trajectories=[Trajectory(name="buyer", reward=0.25, steps=[step])])  # type: ignore[arg-type]
    log.tracker.log_episodes(1, "train", [episode])
    return log.take()


def test_excerpt_shows_tools_and_the_end_of_a_chat(log: Log) -> None:
    call = {"function": {"name": "price", "arguments": '{"item": "fig"}'}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    lines = excerpt(log, {"role": "user", "content": "A fig?"}, *turn * 4, {"role": "assistant", "content": "[3]\x1b"})
    assert lines == [
        "  sample figs:0: reward 0.250, wrong, cut off",
        "        ...  4 earlier messages",
        "       tool  3",
        *['  assistant  price({"item": "fig"})', "       tool  3"] * 2,
        "  assistant  [3]␛",
    ]


def test_excerpt_is_short_and_keeps_the_important_parts(log: Log) -> None:
    long: Callable[[str], str] = lambda word: f"{word}-first {'x y ' * 300} {word}-last"  # noqa: E731
    lines = excerpt(log, {"role": "user", "content": long("ask")}, {"role": "assistant", "content": long("say")})
    text = "\n".join(lines)
    assert "ask-last" in text
    assert "ask-first" not in text
    assert "say-first" in text
    assert "say-last" in text
    assert len(lines) <= 1 + 2 * 4
    assert max(map(len, lines)) <= 120


def test_failed_rollout_shows_its_failure(log: Log) -> None:
    log.tracker.log_episodes(1, "train", [rollout(None, failed=True)])
    assert log.take()[0] == "  sample figs:0: unscored, failed with AgentError"
