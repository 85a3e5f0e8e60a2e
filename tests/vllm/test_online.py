"""Sessions of users, answered by a real vLLM: their rewards change the weights that sample the next answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rllm.store import open_store
from rllm.trainer.online import session_trainer
from rllm.types import Trace

from ..ports import free_port
from ..trainer.test_online import KEY, User, talking
from .conftest import Servers
from .test_training import assert_exact

pytestmark = pytest.mark.vllm
NUM_SESSIONS = 4


def test_published_weights_sample_the_next_answers_of_users(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_GATEWAY_API_KEY", KEY)
    server, store, port = servers.serve(), tmp_path / "sessions.db", free_port()

    def talk(user: User) -> None:
        for version in (0, 1):
            while all(trace.weight_version != version for trace in traces_of(store)):
                user.talk(None, max_tokens=4)
                time.sleep(0.1)
            for number in range(NUM_SESSIONS):
                user.talk(float(number % 2), max_tokens=12)

    trainer = session_trainer(
        str(store),
        [
            *("model.engine=vllm", f"vllm.url={server.url}", f"model.path={server.folder}", "model.device=cpu"),
            *(f"run_dir={tmp_path / 'run'}", f"gateway.port={port}", f"tasks_per_step={NUM_SESSIONS}", "num_steps=2"),
            *("optim.lr=1e-2", "save_every=1", "trackers=[jsonl]"),
        ],
    )
    with talking(talk, User(port)):
        trainer.train()
    # Sessions that waited for new weights have no reward, and their answers may be sampled by both weights.
    traces = traces_of(store, only_rewarded=True)
    before, after = ([trace for trace in traces if trace.weight_version == version] for version in (0, 1))
    assert (len(before), len(after)) == (NUM_SESSIONS, NUM_SESSIONS)
    assert_exact(str(server.folder), before)
    assert_exact(str(tmp_path / "run" / "checkpoints" / "step-000001"), after)
    with pytest.raises(AssertionError):
        assert_exact(str(server.folder), after)


def traces_of(path: Path, *, only_rewarded: bool = False) -> list[Trace]:
    with open_store(str(path), read_only=True) as store:
        sessions = [item for item in store.sessions() if "reward" in item.metadata or not only_rewarded]
        return [trace for session in sessions for trace in store.by_session(session.id)]
