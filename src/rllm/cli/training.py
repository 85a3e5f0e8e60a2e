"""Common parts of commands that train: settings, the gateway's address, progress, results and `--resume`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rllm._runtime.files import from_here
from rllm.cli import terminal
from rllm.cli.display import LiveDisplay
from rllm.cli.options import RunOptions
from rllm.cli.terminal import CTRL_C, print_stopped, saved_state
from rllm.config.loading import ConfigLayer, from_layers, layers_of
from rllm.config.reference import origins
from rllm.config.sizes import rate_in_words, sizes_in_words
from rllm.errors import USER_CODE_ERRORS, ConfigError
from rllm.tracking.base import Tracker
from rllm.trainer.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.tracking.about import Beginning
    from rllm.trainer.agent_trainer import AgentTrainer, TrainResult


def chosen_settings(
    settings: Sequence[str], options: RunOptions, others: Mapping[str, str | None] = MappingProxyType({})
) -> tuple[TrainConfig, list[ConfigLayer]]:
    """Return the settings of a run, from a file or the resumed run and overridden by options, and their origins."""
    if options.resume is not None and options.config is not None:
        raise ConfigError("--resume takes the settings of the run; leave out --config")
    source = options.resume / "config.yaml" if options.resume else options.config
    given = {"model.path": options.model, **others, "run_dir": options.resume}
    layers = layers_of(source, [*settings, *(f"{key}={value}" for key, value in given.items() if value)])
    return from_layers(layers), layers


def announce(config: TrainConfig, *, dry_run: bool = False) -> None:
    """Print that the run's model is loaded, if it has one: the first output of a command, before slow imports."""
    if config.model.path and not dry_run:
        terminal.console(stderr=True).print(f"{terminal.loading(config.model.path)} ...", soft_wrap=True, markup=False)


def carry_out(
    trainer: AgentTrainer,
    layers: Sequence[ConfigLayer],
    options: RunOptions,
    *,
    begun: Beginning,
    started: float,
    port: int | None = None,
    measure: str,
) -> None:
    """Train, or with `--dry-run` print the plan. Ctrl-C ends the process with code 130.

    Args:
        trainer: a trainer that has not started.
        layers: origins of its settings.
        options: options of the command.
        begun: arguments that the run is started with, `command` among them.
        started: start of the command, of `time.perf_counter()`.
        port: result of `lead_to_gateway`.
        measure: held-out measure in the line of JSON at the end, `accuracy` or `loss`.
    """
    if options.dry_run:
        _show_settings(trainer, layers)
        return
    if port is not None:
        trainer.config.gateway.port = port
    console = terminal.console(stderr=True)
    for line in _preflight(trainer):
        console.print(line, soft_wrap=True)
    trainer.begun_as = dict(begun)
    shown = from_here(trainer.run_dir)  # before an agent changes the current folder
    result = _trained(trainer, console, shown, [begun["command"], "--resume", str(shown)])
    model = shown / result.checkpoint.relative_to(trainer.run_dir)
    console.print(f"\nTrained model: {model}", soft_wrap=True, markup=False)
    if options.as_json:
        measured = evaluated(result.run_dir, f"eval/{measure}")
        terminal.print_json(
            {
                f"{measure}_before": measured[0] if measured else None,
                f"{measure}_after": measured[-1] if measured else None,
                "seconds": time.perf_counter() - started,
                "run_dir": str(shown),
            }
        )


def _trained(trainer: AgentTrainer, console: Console, shown_dir: Path, again: Sequence[str]) -> TrainResult:
    """Train and show progress. After Ctrl-C or an error, print `again`, the command that resumes."""
    try:
        with ExitStack() as shown:
            trainer.trackers = display(console, trainer)
            for tracker in trainer.trackers:  # the run closes them only if it starts
                shown.callback(tracker.close)
            if not trainer.trackers and "console" not in trainer.config.trackers:  # which print it themselves
                console.print(f"Run folder: {shown_dir}", soft_wrap=True, markup=False)
            return trainer.train()
    except KeyboardInterrupt:
        print_stopped(console, trainer.run_dir, again, num_steps=trainer.config.num_steps)
        sys.exit(CTRL_C)
    except Exception as error:
        if not isinstance(error, ConfigError):
            own_code = isinstance(error, USER_CODE_ERRORS)
            steps = trainer.config.num_steps
            error.add_note(saved_state(trainer.run_dir, again, num_steps=steps, own_code=own_code))
        raise


def _show_settings(trainer: AgentTrainer, layers: Sequence[ConfigLayer]) -> None:
    from rllm.backends.lora import planned_coverage
    from rllm.trainer.settings import prompt_tokens, training_memory

    settings = origins(trainer.config, layers, trainer.algorithm.settings(), rate_origin=trainer.rate_origin)
    widths = [max(len(str(getattr(item, name))) for item in settings) for name in ("key", "value")]
    for item in settings:
        print(f"{item.key:<{widths[0]}}  {item.value!s:<{min(widths[1], 40)}}  {item.origin}")
    print()
    for sentence in [
        *sizes_in_words(trainer.config, len(trainer.train_data), needs_greedy=trainer.algorithm.needs_greedy),
        *([] if trainer.source.demonstrates else trainer.sampler.in_words(trainer.steps_done)),
        *training_memory(trainer.config, prompt_tokens(trainer.train_data)),
    ]:
        print(sentence)
    adapter = planned_coverage(trainer.config) if trainer.config.model.lora_rank else None
    for line in [*_chat_template(trainer), *([] if adapter is None else [str(adapter)]), *_preflight(trainer)]:
        print(line)


def _chat_template(trainer: AgentTrainer) -> list[str]:
    """Return a warning for parts of messages that a model's chat template drops or refuses."""
    from rllm.inference.local.loading import tokenizer_of
    from rllm.parser.chat_template import ChatTemplate
    from rllm.trainer.checkup import lost_finding

    model = trainer.config.model
    if not model.path or not Path(model.path).expanduser().is_dir():
        return []
    found = lost_finding(ChatTemplate(tokenizer_of(model).tokenizer).shape.lost)
    return [] if found is None else [f"{found.name}: {found.detail}: {found.fix}"]


def _preflight(trainer: AgentTrainer) -> list[str]:
    """Return the plan of a run: a remark on its learning rate, and the check of a cluster's nodes."""
    config = trainer.config
    lines = rate_in_words(config, trainer.rate_origin, demonstrates=trainer.source.demonstrates)
    if trainer.cluster_plan:
        needs_greedy = trainer.algorithm.needs_greedy
        sizes = sizes_in_words(config, len(trainer.train_data), needs_greedy=needs_greedy)
        lines += [*trainer.cluster_plan, *sizes]
    return lines


def lead_to_gateway(config: TrainConfig) -> int:
    """Choose the gateway's port, set `OPENAI_BASE_URL` to it, and return it.

    Called before the agent's module is imported, since a client that it creates on import reads the variable then.
    """
    from rllm.gateway.config import is_loopback
    from rllm.gateway.identity import unnamed_key
    from rllm.gateway.server import reserve, url_of
    from rllm.sdk.propagation import environment
    from rllm.sdk.variables import beside_own_keys, hide_operators_keys, run_key

    hide_operators_keys()
    host = config.gateway.host
    if not is_loopback(host) and config.rollout.runner == "local":
        raise ConfigError(
            f"gateway.host={host!r}: agents run on this machine, so use 127.0.0.1 or another loopback address"
        )
    listener = reserve(host, config.gateway.port)  # other programs may ask for a free port while the model is loaded
    port: int = listener.getsockname()[1]
    variables = environment(url_of(listener, host), api_key=unnamed_key(run_key()))
    os.environ.update(beside_own_keys(variables, os.environ))
    return port


def display(console: Console, trainer: AgentTrainer) -> list[Tracker]:
    """Return a live display on a terminal; elsewhere the configured trackers print lines."""
    if not console.is_interactive:
        return []
    config = trainer.config
    config.trackers = [name for name in config.trackers if name != "console"]
    settings = {"num_steps": config.num_steps, "log_samples": config.log_samples}
    return [LiveDisplay(console, trainer.run_dir, settings, lambda: trainer.under_way, num_done=trainer.steps_done)]


def evaluated(run_dir: Path, metric: str) -> list[float]:
    """Return a held-out metric, such as `eval/accuracy`, of every evaluation of a run."""
    from rllm.tracking.about import evaluations_of

    return [metrics[metric] for metrics in evaluations_of(run_dir) if metric in metrics]


def quiet_libraries() -> None:
    """Disable the progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def begun_as(command: str, options: RunOptions, **given: str | list[str] | None) -> Beginning:
    """Return the arguments of a command by name: given ones, then those that the run was started with."""
    given |= {name: getattr(options, name) for name in ("split", "val", "val_split")}
    chosen = {name: value for name, value in given.items() if value}
    before = {} if options.resume is None else _beginning(options.resume, command)
    for part, whole in (("split", "data"), ("val_split", "val")):  # a split belongs to its data
        if whole in chosen:
            before.pop(part, None)
    begun = {"command": command, **before, **chosen}
    if "val_split" in begun and "val" not in begun:
        raise ConfigError(f"--val-split {begun['val_split']}: there is no held-out data; give --val")
    return begun


def _beginning(run: Path, command: str) -> Beginning:
    from rllm.tracking.about import beginning_of, how_to_trust, is_own, way_to_a_run

    if not (run / "config.yaml").is_file():
        raise ConfigError(f"--resume {run}: there is no run (no config.yaml); {way_to_a_run(run)}")
    before = beginning_of(run)
    if not is_own(run):
        raise ConfigError(
            f"--resume {run}: you did not begin this run here, or its config.yaml or begun_as.yaml was changed; they "
            f"name code to run: {how_to_trust(run)}"
        )
    by = before.pop("command", command)
    if by != command:
        raise ConfigError(f"--resume {run}: the run was started by rllm {by}: use rllm {by} --resume {run}")
    return before
