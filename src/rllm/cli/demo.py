"""`rllm demo`: train an unmodified agent on this machine in minutes, with a tiny or a pretrained model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import AsJson, RunOptions, optional

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.tracking.about import Beginning
    from rllm.types import Task

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
    seed: Annotated[int, typer.Option(help="Another seed gives other tasks and another run.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model to use its tools instead of guessing: a plain `openai` agent, its exact tokens, and GRPO.

    Builds the model on first use. Nothing leaves this machine. With --model, train a pretrained one to add and
    subtract: some minutes on two CPU cores for one of 135 million weights. `rllm train --resume` continues the run.
    """
    started = time.perf_counter()
    from rllm.cli import terminal

    console = terminal.console(stderr=as_json)
    loading = "loading a tiny model; the first time it is built here, which takes a minute or two"
    console.print(f"{terminal.loading(model) if model else loading} ...", soft_wrap=True, markup=False)
    from rllm.cli.training import carry_out, chosen_settings, lead_to_gateway, quiet_libraries
    from rllm.demo.tasks import demo_policy, shop_tasks, sum_tasks

    quiet_libraries()  # which imports transformers
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    own = TINY if model is None else [*PRETRAINED, f"model.path={model}"]
    options = RunOptions(as_json=as_json)
    config, layers = chosen_settings([*own, f"seed={seed}", f"run_dir={folder}"], options)
    port = lead_to_gateway(config)
    from rllm.demo import agent  # makes its client as it is imported, so it comes after the line above
    from rllm.trainer.agent_trainer import AgentTrainer

    function: Callable[..., float] = agent.shop_assistant if model is None else agent.add_up
    make_tasks = shop_tasks if model is None else sum_tasks
    if model is None:
        about = "A shop assistant, whose model has tools but mostly guesses, answers questions on prices: an agent"
        config.model.path = str(demo_policy(agent.SYSTEM, agent.TOOLS))
    else:
        about = "A pretrained model adds and subtracts up to three numbers, asked by an agent"
    held_out = make_tasks(NUM_HELD_OUT_TASKS, seed=-1 - seed)
    tasks = [task for task in make_tasks(NUM_TRAIN_TASKS, seed=seed) if task not in held_out]
    trainer = AgentTrainer(agent_run_func=function, train_dataset=tasks, val_dataset=held_out, config=config)
    console.print(
        f"{about} in plain [bold]openai[/] ({Path(agent.__file__).name}). Its calls go through the gateway, which "
        f"stores exact tokens; {config.rollout.group_size} answers to each question are compared (GRPO), and good ones "
        "become more likely.\n"
    )
    begun: Beginning = {
        "command": "train",
        "agent": f"{agent.__name__}:{function.__name__}",
        "data": [_written(tasks, folder / "data.jsonl")],
        "val": _written(held_out, folder / "held_out.jsonl"),
    }
    carry_out(trainer, layers, options, begun=begun, started=started, port=port, measure="accuracy")
    _report(console, folder, seconds=time.perf_counter() - started)


def _written(tasks: list[Task], path: Path) -> str:
    """Write tasks to a file of the run, which `rllm train --resume` reads, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return str(path.absolute())


def _report(console: Console, run_dir: Path, *, seconds: float) -> None:
    """Print one conversation before and after training, the accuracies, and the next command."""
    from rllm.cli.display import conversation
    from rllm.cli.training import evaluated
    from rllm.trainer.episode_records import stored_episodes

    held_out = [episode for episode in stored_episodes(run_dir) if episode.info["split"] == "eval"]
    first = {episode.task_id: episode for episode in held_out if episode.info["training_step"] == 0}
    last = {episode.task_id: episode for episode in held_out}
    learned = [name for name in first if not first[name].is_correct and last[name].is_correct]
    for title, episodes in (("Before", first), ("After", last)) if learned else ():
        console.print(f"\n[bold]{title}[/]")
        console.print(conversation(episodes[learned[0]]))
    before, *_, after = evaluated(run_dir, "eval/accuracy")
    console.print(f"\nHeld-out accuracy: [bold]{before:.0%} -> {after:.0%}[/] in {seconds:.0f} s")
    console.print(f"Every token and its reward: {run_dir} (metrics.jsonl, traces.db, checkpoints/)", soft_wrap=True)
    command = sys.argv[0]  # `make demo` runs it by its path
    program = command if Path(command).name == "rllm" and which("rllm") is None else "rllm"
    console.print(
        f"\nLook at it in a browser:\n  {program} view {run_dir}\n"
        "Next, train an agent of your own; it only has to return its reward:\n"
        f"  {program} train my_agent.py:agent --data tasks.jsonl --model Qwen/Qwen3-0.6B",
        soft_wrap=True,
        markup=False,
    )
