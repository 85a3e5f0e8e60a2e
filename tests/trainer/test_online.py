"""Learning from sessions of users, whose rewards arrive later."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.store import open_store
from rllm.testing.scripted import ScriptedEngine
from rllm.trainer.config import load_config
from rllm.trainer.online import LEARNED_KEY, session_trainer

from ..ports import free_port
from .conftest import BACKEND, ScriptedBackend, ask

KEY = "a-key-of-the-operator"


class User:
    """A program that opens sessions, talks, and rewards the answers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def talk(self, reward: float | None, *, task_id: str | None = None, **options: Any) -> str:
        session = self.send("/sessions", {"metadata": {} if task_id is None else {"task_id": task_id}})
        ask(session["base_url"], "hello", api_key=session["api_key"], **options)
        if reward is not None:
            self.send(f"/sessions/{session['id']}/reward", {"reward": reward})
        return str(session["id"])

    def wait(self) -> None:
        """Wait until the gateway answers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self._url}/healthz", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(talk, {"num_steps": 2})` trains while `talk(user)` talks, and returns the metrics of each step."""
    monkeypatch.setenv("RLLM_GATEWAY_API_KEY", KEY)
    monkeypatch.setattr("rllm.trainer.online._POLL_S", 0.01)

    def train(talk: Callable[[User], object], settings: dict[str, Any], *, resume: bool = False) -> list[Any]:
        port = free_port()
        config = {
            "run_dir": str(tmp_path / "run"),
            "backend": BACKEND,
            "model": {"path": "scripted"},
            "trackers": ["jsonl"],
            "tasks_per_step": 2,
            "gateway": {"port": port},
            **settings,
        }
        trainer = session_trainer(str(tmp_path / "traces.db"), load_config(config), resume=resume)
        with talking(talk, User(port)):
            trainer.train()
        return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    return train


@contextmanager
def talking(talk: Callable[[User], object], user: User) -> Iterator[None]:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            user.wait()
            talk(user)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(60)
    assert failures == []


def advantages() -> list[list[float]]:
    """Return the advantages of the sequences of each batch."""
    return [sorted({round(float(value), 4) for value in batch.advantages}) for batch in ScriptedBackend.latest.batches]


def test_single_sessions_are_compared_with_a_running_mean(run: Run) -> None:
    def talk(user: User) -> None:
        user.talk(None)  # never rewarded, never trained
        for reward in (1.0, 0.0, 1.0, 0.0):
            user.talk(reward)

    first, second = run(talk, {"num_steps": 2})
    assert (first["rollout/reward"], first["tokens/staleness_max"]) == (0.5, 0.0)
    # Baselines: none for the first, then the means of 1, of 1 and 0, and of 1, 0 and 1.
    assert advantages() == [[-1.0], [-0.6667, 0.5]]
    assert ScriptedBackend.latest.algorithms[0].correction == "truncate"
    assert second["policy/weight_version"] == 2.0


def test_sessions_of_a_task_are_compared_with_each_other(run: Run) -> None:
    def talk(user: User) -> None:
        user.talk(1.0, task_id="sums:1")
        user.talk(0.0, task_id="sums:1")

    run(talk, {"num_steps": 1})
    assert advantages() == [[-0.5, 0.5]]


def test_session_is_trained_once_and_again_only_after_lost_steps(run: Run, tmp_path: Path) -> None:
    def talk(user: User) -> None:
        for reward in (1.0, 0.0):
            user.talk(reward)

    def steps_of() -> list[int]:
        with open_store(str(tmp_path / "traces.db"), read_only=True) as store:
            return [item.metadata[LEARNED_KEY]["step"] for item in store.sessions(oldest_first=True)]

    run(talk, {"num_steps": 1})
    run(talk, {"num_steps": 2}, resume=True)
    assert steps_of() == [0, 0, 1, 1]
    with open_store(str(tmp_path / "traces.db")) as store:  # as if the process had died in its third step
        newest, *_ = store.sessions(limit=1)
        store.open_session(newest.id, {LEARNED_KEY: {**newest.metadata[LEARNED_KEY], "step": 2}}).result()
    run(lambda user: user.talk(1.0), {"num_steps": 3}, resume=True)
    assert steps_of() == [0, 0, 1, 2, 2]


def test_sessions_of_another_gateway_are_trained(run: Run, tmp_path: Path) -> None:
    upstream = EngineUpstream(ScriptedEngine(["hello", "bye"]), "policy")
    config = GatewayConfig(api_key=KEY)
    with open_store(str(tmp_path / "traces.db")) as store, GatewayServer(store, upstream, config) as gateway:
        for reward in (1.0, 0.0):
            User(int(gateway.url.rpartition(":")[2])).talk(reward, task_id="greeting")
        (line,) = run(lambda user: None, {"num_steps": 1})
    assert line["rollout/reward"] == 0.5
    assert advantages() == [[-0.5, 0.5]]


def test_tokens_sampled_with_other_settings_are_dropped_with_the_reason(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def talk(user: User) -> None:
        user.talk(1.0, temperature=0.5)
        user.talk(1.0, top_p=0.9)
        user.talk(1.0)
        user.talk(0.0)

    (line,) = run(talk, {"num_steps": 1, "tasks_per_step": 4})
    assert line["dropped/other_sampling"] == 2.0
    assert "temperature 0.5, and rollout.temperature is 1" in caplog.text
    assert "top_p=0.9" in caplog.text
    assert line["batch/num_sequences"] == 1.0


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rollout.group_size=4", r"rollout\.group_size=4"),
        ("rollout.max_tokens=9", r"rollout\.max_tokens=9"),
        ("data.sampling=difficulty", r"data\.sampling"),
        ("eval.num_rollouts=3", r"eval\.num_rollouts"),
    ],
)
def test_ineffective_settings_for_sessions_are_rejected(tmp_path: Path, setting: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        session_trainer(str(tmp_path / "traces.db"), [f"run_dir={tmp_path}/run", "model.path=m", setting])
