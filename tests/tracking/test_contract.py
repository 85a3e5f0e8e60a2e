"""The same metrics and the same conversations in every tracker, as read back from its files.

Only `make test-trackers` has all their packages; none of them uses the network.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rllm.errors import ConfigError
from rllm.tracking.about import forget_trackers
from rllm.tracking.base import Trackers, forget_after
from rllm.types import Episode, Step, Trajectory

from .readers import READERS, read_wandb

FIRST = {"rollout/reward": 0.25, "policy/kl": 1e-4, "agent/num tools": 3.0, "val/pass@1": 0.5}
SECOND = {"rollout/reward": 0.75, "policy/kl": -2.5, "eval/accuracy": 1.0, "policy/ratio": math.nan}
ANSWER = "<script>alert(1)</script> a | b\nand `more`"

optional = pytest.mark.trackers
EACH = ["jsonl", *(pytest.param(name, marks=optional) for name in READERS if name != "jsonl")]


@pytest.fixture
def no_outgoing_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections to other hosts, those of helper processes included, are recorded here."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_outgoing_connections: None) -> Path:
    """A run's folder with its configuration; every tracker stays on this machine, and in the test's folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first-try"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"log_samples": 4, "project": "fruit", "optim": {"lr": 1e-5}}))
    return folder


def episode(index: int, reward: float | None) -> Episode:
    chat = [{"role": "user", "content": "How many figs?"}, {"role": "assistant", "content": ANSWER}]
    return Episode(
        task_id="figs", index=index, trajectories=[Trajectory(reward=reward, steps=[Step(chat_completions=chat)])]
    )


@pytest.mark.parametrize("name", EACH)
def test_logged_values_can_be_read_back(name: str, run_dir: Path) -> None:
    trackers = Trackers.start([name], run_dir)
    trackers.log(1, FIRST)
    trackers.progress("update", 0, 1)
    trackers.log(2, SECOND)
    trackers.log(2, {"eval/reward": 0.5})  # a step may be logged in several parts
    trackers.close()
    trackers.close()
    numbers, _ = READERS[name](run_dir)
    expected = {(1, key): value for key, value in FIRST.items()} | {(2, key): value for key, value in SECOND.items()}
    expected[2, "eval/reward"] = 0.5
    if name == "mlflow":
        expected[1, "val/pass_at_1"] = expected.pop((1, "val/pass@1"))  # which accepts no @
    assert numbers.keys() == expected.keys()
    for key, value in expected.items():
        assert numbers[key] == [pytest.approx(value, rel=1e-6, nan_ok=True)], key


@optional
def test_several_trackers_get_the_same_values(run_dir: Path) -> None:
    trackers = Trackers.start(list(READERS), run_dir)
    for step in (1, 2):
        trackers.log(step, {"rollout/reward": 0.25 * step, "policy/kl": -1.0})
    trackers.close()
    expected = {(step, "rollout/reward"): [0.25 * step] for step in (1, 2)}
    expected |= {(step, "policy/kl"): [-1.0] for step in (1, 2)}
    assert {name: read(run_dir)[0] for name, read in READERS.items()} == dict.fromkeys(READERS, expected)


@optional
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_conversations_are_tables(name: str, run_dir: Path) -> None:
    trackers = Trackers.start([name], run_dir)
    trackers.log_episodes(1, "train", [episode(0, 1.0), episode(1, None), episode(2, 0.5)])
    trackers.log_episodes(1, "eval", [])
    trackers.log_episodes(2, "train", [episode(0, 0.0)])
    trackers.close()
    tables = READERS[name](run_dir)[1]
    assert list(tables) == ["samples/train"]
    rows = tables["samples/train"]
    assert [(int(row["step"]), row["episode"]) for row in rows] == [
        (1, "figs:1"),
        (1, "figs:2"),
        (1, "figs:0"),
        (2, "figs:0"),
    ]
    assert [str(row["reward"]) for row in rows[1:]] == ["0.5", "1.0", "0.0"]
    assert {row["conversation"] for row in rows} == {f"user: How many figs?\n\nassistant: {ANSWER}"}


@optional
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_resumed_run_continues_the_same_tracker_run(name: str, run_dir: Path) -> None:
    for step in (1, 2):
        trackers = Trackers.start(["jsonl", name], run_dir)
        trackers.log(step, {"rollout/reward": 0.5 * step})
        trackers.close()
    assert READERS[name](run_dir)[0] == {(1, "rollout/reward"): [0.5], (2, "rollout/reward"): [1.0]}


LOGS_FOREVER = """
import signal, sys
from pathlib import Path
from rllm.tracking.base import Trackers
from rllm.types import Episode, Trajectory

trackers = Trackers.start(["jsonl", sys.argv[1]], Path(sys.argv[2]))
for step in (1, 2, 3):
    trackers.log(step, {"rollout/reward": float(step)})
    trackers.log(step, {"eval/reward": step / 10})
    trackers.log_episodes(step, "train", [Episode(task_id="figs", trajectories=[Trajectory(reward=float(step))])])
signal.pause()
"""


def log_and_be_killed(name: str, run_dir: Path) -> None:
    """Log three steps, and be killed once they have arrived."""
    own = {
        key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"
    }  # without the W&B service of this process
    command = [sys.executable, "-c", LOGS_FOREVER, name, str(run_dir)]
    training = subprocess.Popen(command, env=own, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not has_arrived(name, run_dir, step=3):
        assert training.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    training.kill()
    training.wait(60)


def has_arrived(name: str, run_dir: Path, step: int) -> bool:
    try:
        tables = read_wandb(run_dir, has_ended=False)[1] if name == "wandb" else READERS[name](run_dir)[1]
    except Exception:  # it is being created, or written
        return False
    return step in [int(row["step"]) for row in tables.get("samples/train", [])]


@optional
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_steps_repeated_after_a_kill_are_logged_once(name: str, run_dir: Path) -> None:
    log_and_be_killed(name, run_dir)
    forget_after(run_dir / "metrics.jsonl", 1)  # the checkpoint that is resumed is of step 1
    again = Trackers.start(["jsonl", name], run_dir)
    for step in (2, 3, 4):
        again.log(step, {"rollout/reward": float(step)})
        again.log(step, {"eval/reward": step / 10})
        again.log_episodes(step, "train", [episode(0, float(step))])
    again.close()
    numbers, tables = READERS[name](run_dir)
    expected = {(step, "rollout/reward"): [float(step)] for step in (1, 2, 3, 4)}
    assert numbers == expected | {(step, "eval/reward"): [pytest.approx(step / 10)] for step in (1, 2, 3, 4)}
    assert sorted(int(row["step"]) for row in tables["samples/train"]) == [1, 2, 3, 4]


@optional
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_restarted_run_is_a_new_tracker_run(name: str, run_dir: Path) -> None:
    for value in (1.0, 2.0):
        forget_trackers(run_dir)
        trackers = Trackers.start([name], run_dir)
        trackers.log(1, {"rollout/reward": value})
        trackers.close()
    numbers, _ = READERS[name](run_dir)
    assert numbers == {(1, "rollout/reward"): [2.0]}


@optional
def test_unreachable_server_stops_the_run_at_start(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="trackers='mlflow' cannot start"):
        Trackers.start(["mlflow"], run_dir)


@optional
def test_store_lost_during_a_run_ends_only_its_tracker(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers.start(["mlflow", "jsonl"], run_dir)
    trackers.log(1, FIRST)
    (run_dir.parents[1] / "mlruns").rename(run_dir / "gone")
    for step in (2, 3):
        trackers.log(step, SECOND)
    trackers.close()
    named = [record.message for record in caplog.records if record.name == "rllm.tracking.base"]
    assert len(named) == 1
    assert named[0].startswith("tracker mlflow failed")
    assert {step for step, _ in READERS["jsonl"](run_dir)[0]} == {1, 2, 3}


@optional
def test_wandb_reports_the_last_received_step_of_a_resumed_run(run_dir: Path) -> None:
    import wandb

    from rllm.tracking.trackers import last_wandb_step

    fresh = wandb.init(dir=run_dir, reinit="create_new")
    resumed = wandb.init(dir=run_dir, reinit="create_new", settings=wandb.Settings(resumed=True))
    assert (last_wandb_step(fresh), last_wandb_step(resumed)) == (None, -1)
    resumed.log({"step": 3})
    assert last_wandb_step(resumed) == 3
    for run in (fresh, resumed):
        run.finish()


@optional
def test_wandb_without_login_is_reported(run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    wandb.teardown()  # W&B reads its variables only once
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="trackers='wandb' cannot start: UsageError: No API key configured"):
        Trackers.start(["wandb"], run_dir)
