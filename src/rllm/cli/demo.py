"""`rllm demo`: train an unmodified agent on this machine, in minutes and without network."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import AsJson, RunOptions, optional

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.config import TrainConfig
    from rllm.types import Episode

SETTINGS = [
    "num_steps=24",
    "tasks_per_step=8",
    "rollout.group_size=8",
    "rollout.timeout_s=60",
    "optim.lr=5e-4",
    "optim.schedule=linear",
    "eval.every=8",
    "save_every=8",
]
NUM_TRAIN_TASKS, NUM_HELD_OUT_TASKS = 1000, 100


def demo(
    seed: Annotated[
        int | None, typer.Option(help="Another seed gives other tasks and another run.", show_default="0")
    ] = None,
    resume: Annotated[Path | None, optional("Run folder to resume.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model to use its tools instead of guessing: a plain `openai` agent, its exact tokens, and GRPO.

    Builds the model on first use. Nothing leaves this machine.
    """
    started = time.perf_counter()
    from rllm.cli import terminal

    console = terminal.console(stderr=as_json)
    console.print(
        "loading a tiny model; the first time it is built here, which takes a minute or two ...", soft_wrap=True
    )
    from rllm.cli.terminal import CTRL_C, print_stopped
    from rllm.cli.training import evaluated, quiet_libraries

    quiet_libraries()  # which imports transformers
    config = _config(seed, resume)
    assert config.run_dir is not None
    samples = _FirstAndLast()
    try:
        _train(console, config, samples, resume=resume is not None)
    except KeyboardInterrupt:
        print_stopped(console, config.run_dir, ["demo", "--resume", str(config.run_dir)], num_steps=config.num_steps)
        sys.exit(CTRL_C)
    measured = evaluated(config.run_dir, "eval/accuracy")
    outcome = {
        "accuracy_before": measured[0],
        "accuracy_after": measured[-1],
        "seconds": round(time.perf_counter() - started, 1),
        "run_dir": str(config.run_dir),
    }
    _report(console, samples, config, outcome)
    if as_json:
        terminal.print_json(outcome)


class _FirstAndLast:
    """Tracker that keeps the first and the last held-out episodes."""

    def __init__(self) -> None:
        self.evaluations: list[Sequence[Episode]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: another tracker shows metrics."""

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        if split == "eval":
            self.evaluations = [*self.evaluations[:1], episodes]

    def progress(self, phase: str, done: int, total: int) -> None:
        """Do nothing: another tracker shows progress."""

    def close(self) -> None:
        """Do nothing: nothing is pending."""


def _config(seed: int | None, resume: Path | None) -> TrainConfig:
    from rllm.cli.training import begun_as
    from rllm.errors import ConfigError
    from rllm.trainer.config import load_config

    if resume is not None:
        begun_as("demo", RunOptions(resume=resume))
        config = load_config(resume / "config.yaml")
        if seed not in (None, config.seed):
            raise ConfigError(f"--seed {seed}: the run in {resume} has seed {config.seed}; leave --seed out")
        config.run_dir = resume
        return config
    seed = seed or 0
    run_dir = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    return load_config([*SETTINGS, f"seed={seed}", f"run_dir={run_dir}"])


def _train(console: Console, config: TrainConfig, samples: _FirstAndLast, *, resume: bool) -> None:
    from rllm.cli.training import display, lead_to_gateway
    from rllm.demo.tasks import demo_policy, shop_tasks
    from rllm.trainer.agent_trainer import AgentTrainer

    port = lead_to_gateway(config)
    from rllm.demo import agent  # makes its client as it is imported, so it comes after the line above

    config.model.path = str(demo_policy(agent.SYSTEM, agent.TOOLS))
    trainer = AgentTrainer(
        agent_run_func=agent.shop_assistant,
        train_dataset=shop_tasks(NUM_TRAIN_TASKS, seed=config.seed),
        val_dataset=shop_tasks(NUM_HELD_OUT_TASKS, seed=-1 - config.seed),
        config=config,
        resume=resume,
    )
    trainer.config.gateway.port = port
    trainer.begun_as = {"command": "demo"}
    console.print(
        f"A shop assistant in plain [bold]openai[/] ({Path(agent.__file__).name}) answers questions on prices. "
        "It has tools, but its model mostly guesses. Its calls go through the gateway, which stores exact tokens; "
        f"{config.rollout.group_size} answers to each question are compared (GRPO), and good ones become more likely.\n"
    )
    trainer.trackers = [*display(console, trainer), samples]
    trainer.train()


def _report(console: Console, samples: _FirstAndLast, config: TrainConfig, outcome: Mapping[str, object]) -> None:
    """Print one conversation before and after training, the accuracies, and the next command."""
    from rllm.cli.display import conversation

    pairs = zip(*samples.evaluations, strict=True)
    learned = (pair for pair in pairs if not pair[0].is_correct and pair[-1].is_correct)
    for title, episode in zip(("Before", "After"), next(learned, ()), strict=False):
        console.print(f"\n[bold]{title}[/]")
        console.print(conversation(episode))
    console.print(
        f"\nHeld-out accuracy: [bold]{outcome['accuracy_before']:.0%} -> {outcome['accuracy_after']:.0%}[/] "
        f"in {outcome['seconds']:.0f} s"
    )
    console.print(
        f"Every token and its reward: {config.run_dir} (metrics.jsonl, traces.db, checkpoints/)", soft_wrap=True
    )
    console.print(
        "\nNext, train an agent of your own; it only has to return its reward:\n"
        "  rllm train my_agent.py:agent --data tasks.jsonl --model Qwen/Qwen3-0.6B",
        soft_wrap=True,
    )
