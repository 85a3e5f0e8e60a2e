"""What the commands that train have in common: settle the settings, find the gateway's address early, show progress, end well."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rllm._runtime.files import from_here
from rllm.cli import terminal
from rllm.cli.display import LiveDisplay
from rllm.cli.stopping import CTRL_C, tell_stopped, what_is_kept
from rllm.config.loading import ConfigLayer, from_layers, layers_of
from rllm.config.model_sizes import rate_in_words
from rllm.config.reference import origins
from rllm.config.step_sizes import sizes_in_words
from rllm.errors import USER_CODE_ERRORS, ConfigError
from rllm.tracking.base import Tracker
from rllm.trainer.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.agent_trainer import AgentTrainer, TrainResult


@dataclass(frozen=True, kw_only=True)
class ChosenSettings:
    """What the options of a command come to."""

    config: TrainConfig
    layers: list[ConfigLayer]
    """Where each value comes from."""


def chosen_settings(
    settings: Sequence[str] | None,
    *,
    model: str | None,
    config: Path | None,
    resume: Path | None,
    backend: str | None = None,
    ray_address: str | None = None,
) -> ChosenSettings:
    """The settings of a run: those of a file or of the run that is gone on with, and what is said beside them.

    Raises:
        ConfigError: naming the setting that is wrong.
    """
    if resume is not None and config is not None:
        raise ConfigError("--resume takes the settings of the run; leave out --config")
    source = resume / "config.yaml" if resume else config
    given = {"model.path": model, "backend": backend, "ray.address": ray_address, "run_dir": resume}
    named = [f"{key}={value}" for key, value in given.items() if value]
    layers = layers_of(source, [*(settings or []), *named])
    return ChosenSettings(config=from_layers(layers), layers=layers)


def announce(config: TrainConfig) -> None:
    """Print that the model of a run is loaded, if it has one; the first thing that a command that trains prints."""
    if config.model.path:
        terminal.console(stderr=True).print(f"{terminal.loading(config.model.path)} ...", soft_wrap=True, markup=False)


def carry_out(
    trainer: AgentTrainer,
    chosen: ChosenSettings,
    *,
    begun: Mapping[str, str],
    started: float,
    dry_run: bool,
    port: int | None = None,
    outcome: tuple[str, Callable[[Path], list[float]]] | None,
) -> None:
    """Train, or with `dry_run` say what would be done. Ctrl-C ends the process with code 130.

    Args:
        trainer: checked, and not begun.
        chosen: what its configuration was made of.
        begun: the arguments that the run is begun with, `command` among them.
        started: on `time.perf_counter()`.
        dry_run: see there.
        port: what `lead_to_gateway` chose.
        outcome: what the line of JSON at the end calls the measure, and how to read it from the run's folder; `None` for no
            such line.
    """
    if dry_run:
        _show_settings(trainer, chosen.layers)
        for line in [*_chat_template(trainer), *_adapter(trainer), *_preflight(trainer)]:
            print(line)
        return
    if port is not None:
        trainer.config.gateway.port = port
    console = terminal.console(stderr=True)
    for line in _preflight(trainer):
        console.print(line, soft_wrap=True)
    trainer.begun_as = dict(begun)
    shown = from_here(trainer.run_dir)  # Before any agent changes the folder.
    result = _trained(trainer, console, shown, [begun["command"], "--resume", str(shown)])
    model = shown / result.checkpoint.relative_to(trainer.run_dir)
    console.print(f"\nTrained model: {model}", soft_wrap=True, markup=False)
    if outcome is not None:
        name, measure = outcome
        measured = measure(result.run_dir)
        terminal.print_json(
            {
                f"{name}_before": measured[0] if measured else None,
                f"{name}_after": measured[-1] if measured else None,
                "seconds": time.perf_counter() - started,
                "run_dir": str(shown),
            }
        )


def _trained(trainer: AgentTrainer, console: Console, shown_dir: Path, again: Sequence[str]) -> TrainResult:
    """Train, showing how far it has come. Ctrl-C ends the process, saying that `again` goes on; so does what fails."""
    try:
        with ExitStack() as shown:
            trainer.trackers = display(console, trainer)
            for tracker in trainer.trackers:  # nobody else closes them where the run does not begin
                shown.callback(tracker.close)
            if "console" not in trainer.config.trackers:  # which begins with it
                console.print(f"Run folder: {shown_dir}", soft_wrap=True, markup=False)
            return trainer.train()
    except KeyboardInterrupt:
        tell_stopped(console, trainer.run_dir, again, num_steps=trainer.config.num_steps)
        sys.exit(CTRL_C)
    except Exception as error:
        if not isinstance(error, ConfigError):
            own_code = isinstance(error, USER_CODE_ERRORS)
            steps = trainer.config.num_steps
            error.add_note(what_is_kept(trainer.run_dir, again, num_steps=steps, own_code=own_code))
        raise


def _show_settings(trainer: AgentTrainer, layers: Sequence[ConfigLayer]) -> None:
    from rllm.trainer.memory import training_memory

    settings = origins(trainer.config, layers, trainer.algorithm.settings(), rate_origin=trainer.rate_origin)
    widths = [max(len(str(getattr(item, name))) for item in settings) for name in ("key", "value")]
    for item in settings:
        print(f"{item.key:<{widths[0]}}  {item.value!s:<{min(widths[1], 40)}}  {item.origin}")
    print()
    for sentence in [*_sizes(trainer), *training_memory(trainer.config)]:
        print(sentence)


def _sizes(trainer: AgentTrainer) -> list[str]:
    return sizes_in_words(trainer.config, len(trainer.train_data), needs_greedy=trainer.algorithm.needs_greedy)


def _chat_template(trainer: AgentTrainer) -> list[str]:
    """Return what the chat template of a model folder leaves out or refuses.

    Raises:
        ConfigError: if the template cannot be used.
    """
    from rllm.inference.local.loading import load_tokenizer
    from rllm.parser.chat_template import ChatTemplate
    from rllm.parser.tool_prompt import TemplateChoice
    from rllm.trainer.checkup.model import lost_finding

    model = trainer.config.model
    if not model.path or not Path(model.path).expanduser().is_dir():
        return []
    tokenizer = load_tokenizer(model.path, template=TemplateChoice.of(model)).tokenizer
    found = lost_finding(ChatTemplate(tokenizer).shape.lost)
    return [] if found is None else [f"{found.name}: {found.said}: {found.fix}"]


def _adapter(trainer: AgentTrainer) -> list[str]:
    from rllm.backends.lora import planned_coverage

    found = planned_coverage(trainer.config) if trainer.config.model.lora_rank else None
    return [] if found is None else [str(found)]


def _preflight(trainer: AgentTrainer) -> list[str]:
    """Return the plan of a run: a remark on its learning rate, and on a cluster what its nodes answered."""
    from rllm.trainer.preflight import preflight
    from rllm.trainer.rollouts import uses_a_cluster

    rate = rate_in_words(trainer.config, trainer.rate_origin, demonstrates=trainer.door.demonstrates)
    return rate + ([*preflight(trainer.config), *_sizes(trainer)] if uses_a_cluster(trainer.config) else [])


def lead_to_gateway(config: TrainConfig) -> int:
    """Choose the gateway's port and point `OPENAI_BASE_URL` at it before the agent's module is imported, because a client
    that the module makes as it is imported reads the variable then. Returns the port."""
    from rllm._runtime.network import is_loopback
    from rllm.gateway.identity import unnamed_key
    from rllm.gateway.server import bind, url_of
    from rllm.sdk.propagation import environment
    from rllm.sdk.variables import beside_own_keys, hide_operators_keys, run_key

    hide_operators_keys()
    host = config.gateway.host
    if not is_loopback(host) and config.rollout.runner == "local":
        raise ConfigError(
            f"gateway.host={host!r}: agents run on this machine, so use 127.0.0.1 or another loopback address"
        )
    with bind(host, config.gateway.port) as listener:
        port: int = listener.getsockname()[1]
        variables = environment(url_of(listener, host), api_key=unnamed_key(run_key()))
    os.environ.update(beside_own_keys(variables, os.environ))
    return port


def display(console: Console, trainer: AgentTrainer) -> list[Tracker]:
    """A live display where there is a terminal; elsewhere the configured trackers print lines."""
    if not console.is_interactive:
        return []
    trainer.config.trackers = [name for name in trainer.config.trackers if name != "console"]
    config, num_done = trainer.config, trainer.steps_done
    return [
        LiveDisplay(
            console,
            config.num_steps,
            lambda: trainer.under_way,
            num_done=num_done,
            log_samples=config.log_samples,
        )
    ]


def accuracies(run_dir: Path) -> list[float]:
    """The held-out accuracy of every evaluation of a run."""
    return _evaluated(run_dir, "eval/accuracy")


def losses(run_dir: Path) -> list[float]:
    """The held-out loss of every evaluation of a run."""
    return _evaluated(run_dir, "eval/loss")


def _evaluated(run_dir: Path, name: str) -> list[float]:
    from rllm.trainer.run_folder import evaluations_of

    return [metrics[name] for metrics in evaluations_of(run_dir) if name in metrics]


@contextmanager
def as_typed(**options: str) -> Iterator[None]:
    """Name in a mistake inside, in the place of an argument of a trainer, the option that it was given by."""
    try:
        yield
    except ConfigError as error:
        told = str(error)
        for argument, option in options.items():
            told = re.sub(rf"\b{argument}(?=[:=,) ])", option, told)
        raise ConfigError(told) from error


def quiet_libraries() -> None:
    """Keep the progress bars of transformers out of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
