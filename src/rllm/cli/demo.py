"""`rllm demo`: train an unmodified agent on this machine in minutes, with a tiny or a pretrained model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import AsJson, RunOptions, optional
from rllm.tracking.base import Tracker

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.tracking.about import Beginning
    from rllm.trainer.config import TrainConfig
    from rllm.types import Episode

TINY = [
    "tasks_per_step=8",
    "rollout.group_size=8",
    "num_steps=24",
    "rollout.timeout_s=60",
    "optim.lr=5e-4",
    "optim.schedule=linear",
    "eval.every=8",
    "save_every=8",
]
# Fewer than one answer in ten is right at first, and a group that is all wrong teaches nothing, so others replace it.
PRETRAINED = [
    "tasks_per_step=8",
    "rollout.group_size=8",
    "rollout.resample_rounds=3",
    "num_steps=15",
    "optim.lr=3e-5",
    "eval.every=5",
    "save_every=5",
]
NUM_TRAIN_TASKS, NUM_HELD_OUT_TASKS = 1000, 100


def demo(
    model: Annotated[
        str | None,
        optional("Pretrained model to train on sums: a folder or hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Another seed gives other tasks and another run.", show_default="0")
    ] = None,
    resume: Annotated[Path | None, optional("Run folder to resume.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model to use its tools instead of guessing: a plain `openai` agent, its exact tokens, and GRPO.

    Builds the model on first use. Nothing leaves this machine. With --model, train a pretrained one to add and
    subtract: some minutes on two CPU cores for one of 135 million weights.
    """
    started = time.perf_counter()
    from rllm.cli import terminal

    console = terminal.console(stderr=as_json)
    config, begun = _config(model, seed, resume)
    model = begun.get("model")
    loading = "loading a tiny model; the first time it is built here, which takes a minute or two"
    console.print(f"{terminal.loading(model) if model else loading} ...", soft_wrap=True, markup=False)
    from rllm.cli.terminal import CTRL_C, print_stopped
    from rllm.cli.training import evaluated, quiet_libraries

    quiet_libraries()  # which imports transformers
    assert config.run_dir is not None
    samples = _FirstAndLast()
    try:
        _train(console, config, samples, begun, resume=resume is not None)
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


class _FirstAndLast(Tracker):
    """Tracker that keeps the first and the last held-out episodes."""

    def __init__(self) -> None:
        self.evaluations: list[Sequence[Episode]] = []

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        if split == "eval":
            self.evaluations = [*self.evaluations[:1], episodes]


def _config(model: str | None, seed: int | None, resume: Path | None) -> tuple[TrainConfig, Beginning]:
    """Return the settings of a run, and the arguments that it is started with; `model` is a pretrained one's only."""
    from rllm.cli.training import begun_as
    from rllm.errors import ConfigError
    from rllm.trainer.config import load_config

    begun = begun_as("demo", RunOptions(resume=resume))
    if resume is not None:
        config = load_config(resume / "config.yaml")
        before = {"model": begun.get("model"), "seed": config.seed}
        for name, value in {"model": model, "seed": seed}.items():
            if value not in (None, before[name]):
                raise ConfigError(f"--{name} {value}: {resume} was begun with {before[name]}; leave --{name} out")
        config.run_dir = resume
        return config, begun
    seed = seed or 0
    run_dir = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    own = TINY if model is None else [*PRETRAINED, f"model.path={model}"]
    given: Beginning = {} if model is None else {"model": model}
    return load_config([*own, f"seed={seed}", f"run_dir={run_dir}"]), begun | given


def _train(console: Console, config: TrainConfig, samples: _FirstAndLast, begun: Beginning, *, resume: bool) -> None:
    from rllm.cli.training import display, lead_to_gateway
    from rllm.demo.tasks import demo_policy, shop_tasks, sum_tasks
    from rllm.trainer.agent_trainer import AgentTrainer

    port = lead_to_gateway(config)
    from rllm.demo import agent  # makes its client as it is imported, so it comes after the line above

    if "model" in begun:
        about = "A pretrained model adds and subtracts up to three numbers, asked by an agent"
        function: Callable[..., float] = agent.add_up
        make_tasks = sum_tasks
    else:
        about = "A shop assistant, whose model has tools but mostly guesses, answers questions on prices: an agent"
        function = agent.shop_assistant
        make_tasks = shop_tasks
        config.model.path = str(demo_policy(agent.SYSTEM, agent.TOOLS))
    held_out = make_tasks(NUM_HELD_OUT_TASKS, seed=-1 - config.seed)
    trainer = AgentTrainer(
        agent_run_func=function,
        train_dataset=[task for task in make_tasks(NUM_TRAIN_TASKS, seed=config.seed) if task not in held_out],
        val_dataset=held_out,
        config=config,
        resume=resume,
    )
    trainer.config.gateway.port = port
    trainer.begun_as = dict(begun)
    console.print(
        f"{about} in plain [bold]openai[/] ({Path(agent.__file__).name}). Its calls go through the gateway, which "
        f"stores exact tokens; {config.rollout.group_size} answers to each question are compared (GRPO), and good ones "
        "become more likely.\n"
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
    command = sys.argv[0]  # `make demo` runs it by its path
    program = command if Path(command).name == "rllm" and which("rllm") is None else "rllm"
    console.print(
        f"\nLook at it in a browser:\n  {program} view {config.run_dir}\n"
        "Next, train an agent of your own; it only has to return its reward:\n"
        f"  {program} train my_agent.py:agent --data tasks.jsonl --model Qwen/Qwen3-0.6B",
        soft_wrap=True,
        markup=False,
    )
