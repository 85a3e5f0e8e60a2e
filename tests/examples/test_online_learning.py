"""The scripted user of online learning, and improvement of the policy while users talk to it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine

from ..ports import free_port

Example = Callable[[str, str], ModuleType]
TRAIN = Path(__file__).parents[2] / "examples" / "online_learning" / "train.py"


def test_user_rewards_correct_answers(example: Example) -> None:
    offline, user = example("online_learning", "offline"), example("online_learning", "user")
    asked, wanted = offline.question(random.Random(3))
    store, engine = MemoryTraceStore(), ScriptedEngine([wanted, "a b"])
    with GatewayServer(store, EngineUpstream(engine, "policy"), GatewayConfig(api_key="key")) as gateway:
        rewards = []
        for _ in range(2):
            with user.User(gateway.url, "key", 3) as a_user:
                rewards.append(a_user.talk())
    assert rewards == [1.0, 0.0]
    assert [session.metadata["reward"] for session in store.sessions(oldest_first=True)] == rewards
    assert store.by_session(store.sessions()[0].id)[0].messages[0]["content"] == asked


def test_demonstrations_answer_the_questions_of_users(example: Example) -> None:
    offline = example("online_learning", "offline")
    for asked, answer in islice(offline._conversations(0, starts_correctly=1.0), 20):
        first, last = asked["content"].split(" to ")
        letters = answer["content"].split()
        assert (letters[0], letters[-1], len(letters)) == (first, last, ord(last) - ord(first) + 1)


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0])
def test_policy_improves_while_users_talk_to_it(tmp_path: Path, seed: int) -> None:
    settings = [f"run_dir={tmp_path / 'run'}", f"gateway.port={free_port()}", f"seed={seed}"]
    done = subprocess.run(
        [sys.executable, str(TRAIN), *settings], capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, re.findall(r"(\d+)%", done.stdout.splitlines()[-1]))
    assert before <= 45
    assert after >= 85
