"""Task folders on another machine, which has none of this one's folders."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from rllm.environments import open_env
from rllm.errors import ConfigError
from rllm.tasks import rollouts
from rllm.testing.gateway import scripted_gateway

from .conftest import backend_or_skip, write_task

pytestmark = pytest.mark.sandbox


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, dict[str, object], Path]:
    """Rollouts as they are sent, the row of a task, and its folder."""
    backend_or_skip("local")
    monkeypatch.setenv("RLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rollouts, "_named", {})
    files = {"environment/data.db": "1\n" * 50_000, "environment/.git/HEAD": "ref\n"}
    folder = write_task(tmp_path / "tasks/first", files)
    os.link(folder / "environment/data.db", folder / "environment/again.db")
    named = open_env(f"tasks:{folder.parent}")
    assert named.agent_run_func is not None
    return pickle.dumps(named.agent_run_func), named.tasks[0], folder


def test_tasks_are_sent_with_their_rollouts(opened: tuple[bytes, dict[str, object], Path]) -> None:
    sent, row, folder = opened
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder.parent)
    play = pickle.loads(sent)
    copy = rollouts.here(str(folder))
    assert {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()} == files
    with scripted_gateway(["echo yes > done", "done"]) as gateway:
        assert gateway.rollout(play, row).is_correct


def test_tasks_too_large_to_send_must_exist_on_the_node(
    opened: tuple[bytes, dict[str, object], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, _, folder = opened
    play = pickle.loads(sent)
    monkeypatch.setattr(rollouts, "MAX_SENT_MB", 0)
    small = pickle.dumps(play)
    pickle.loads(small)
    monkeypatch.setattr(rollouts, "_copies", {})
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=rf"{folder} is not on .* same path"):
        pickle.loads(small)
