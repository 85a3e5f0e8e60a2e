"""Learn from users while they talk: `python examples/online_learning/train.py [key=value ...]`."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path
from threading import Event

import offline
import user

from rllm.trainer.config import load_config
from rllm.trainer.online import session_trainer


def main(settings: list[str]) -> None:
    """Train, and print the mean reward that users gave in the first and in the last steps."""
    key = os.environ.setdefault("RLLM_GATEWAY_API_KEY", secrets.token_urlsafe(32))
    config = load_config({**offline.SETTINGS, "model": {"path": str(offline.policy())}}, settings)
    config.run_dir = config.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    trainer = session_trainer(str(config.run_dir / "sessions.db"), config)
    stopped = Event()
    wait = user.talking(f"http://127.0.0.1:{config.gateway.port}", key, stopped)
    try:
        trainer.train()
    finally:
        stopped.set()
        wait()
    lines = map(json.loads, (trainer.run_dir / "metrics.jsonl").read_text().splitlines())
    rewards = [line["rollout/reward"] for line in lines]
    few = min(3, len(rewards))
    print(f"mean reward of users: {sum(rewards[:few]) / few:.0%} -> {sum(rewards[-few:]) / few:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
