"""Train the receptionist on a judge's scores: `python examples/llm_judge/train.py [key=value ...]`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import agent
import offline
import yaml

from rllm.rewards import judge
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config

RUBRIC = Path(__file__).parent / "rubric.yaml"


def main(settings: list[str]) -> None:
    """Train, and print the judge's mean score for held-out guests before and after."""
    rubric = yaml.safe_load(RUBRIC.read_text())
    config = load_config(offline.SETTINGS, settings)
    train, held_out = offline.tasks(config.seed)
    with ExitStack() as stack:
        if not config.model.path:
            config.model.path = str(offline.policy())
        if rubric["base_url"] == "http://127.0.0.1:8001/v1":  # as in this repository
            rubric["base_url"] = stack.enter_context(offline.judge_server()).base_url
        trainer = AgentTrainer(
            agent_run_func=agent.greet,
            reward=judge(rubric),
            train_dataset=train,
            val_dataset=held_out,
            config=config,
        )
        result = trainer.train()
    before, *_, after = [metrics["eval/reward"] for metrics in result.evaluations]
    print(f"held-out score: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
