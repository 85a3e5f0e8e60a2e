"""Learn Nim by self-play: `python examples/self_play/train.py [key=value ...]`."""

from __future__ import annotations

import sys

import offline

from rllm.environments import open_env
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config

GAME = "textarena:Nim-v0?piles=[1,3]"
NUM_GAMES = 200
SETTINGS = {
    "num_steps": 30,
    "tasks_per_step": 8,
    "rollout": {"group_size": 4, "max_tokens": 8},
    "algorithm": {"name": "rae"},
    "optim": {"lr": 1e-3, "schedule": "linear"},
    "eval": {"every": 30},
    "save_every": 0,
}


def main(settings: list[str]) -> None:
    """Train with both seats played by the policy, and print how often it beats its former self."""
    config = load_config(None, settings)
    if not config.model.path:
        config = load_config({**SETTINGS, "model": {"path": str(offline.policy())}}, settings)
    game = open_env(GAME)
    against_start = open_env(f"{GAME}&opponent=start&size={NUM_GAMES}&seed=1000")
    result = AgentTrainer(
        agent_run_func=game.agent_run_func,
        train_dataset=game.tasks,
        val_dataset=against_start.tasks,
        config=config,
    ).train()
    first, *_, last = result.evaluations
    print(f"games won against the starting policy: {first['eval/game/win']:.0%} -> {last['eval/game/win']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
