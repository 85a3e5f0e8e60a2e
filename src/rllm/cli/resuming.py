"""`--resume`: the arguments that began a run go on with it, so that nobody has to remember them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.cli.settings_command import SettingsCommand
from rllm.errors import ConfigError

_SETTING = re.compile(r"\+{0,2}[\w.]+=")
_PART_OF = {"split": "data", "val_split": "val"}
"""Arguments that mean something only together with another."""


class Resumable(SettingsCommand):
    """A command that can go on with a run; one whose line ends with `--resume` is told which runs there are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[-1:] == ["--resume"]:
            from rllm.trainer.run_folder import way_to_a_run

            raise ConfigError(f"--resume names no run; {way_to_a_run(Path('runs'))}")
        return super().parse_args(ctx, args)


def begun_as(command: str, given: Mapping[str, str | None], *, resume: Path | None) -> dict[str, str]:
    """The arguments of a command, by name: those that are given, and else those that the run was begun with.

    Raises:
        ConfigError: if there is no run to resume, or if another command began it.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    before = {} if resume is None else _beginning(resume, command)
    for part, whole in _PART_OF.items():
        if whole in chosen:
            before.pop(part, None)
    begun = {"command": command, **before, **chosen}
    check_parts(begun)
    return begun


def check_parts(given: Mapping[str, str | None]) -> None:
    """
    Raises:
        ConfigError: if a part is named of held-out data that is not given.
    """
    if given.get("val_split") is not None and given.get("val") is None:
        raise ConfigError(f"--val-split {given['val_split']}: there is no held-out data to take it from; give --val")


def _beginning(run: Path, command: str) -> dict[str, str]:
    from rllm.tracking.own_runs import how_to_trust, is_own
    from rllm.trainer.run_folder import beginning_of, way_to_a_run

    if not (run / "config.yaml").is_file():
        raise ConfigError(f"--resume {run}: no run is there (it would have a config.yaml); {way_to_a_run(run)}")
    before = beginning_of(run)
    if not is_own(run):
        raise ConfigError(
            f"--resume {run}: you did not begin this run here, or its config.yaml or begun_as.yaml was changed since; they "
            f"name code to run: {how_to_trust(run)}"
        )
    by = before.pop("command", command)
    if by != command:
        raise ConfigError(f"--resume {run}: the run was begun by rllm {by}: use rllm {by} --resume {run}")
    return before


def leading_setting(first: str | None, settings: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """An argument that may be left out before settings, and the settings: without it, the first of these takes its place."""
    rest = list(settings or [])
    if first is not None and _SETTING.match(first) and not _names_a_file(first):
        return None, [first, *rest]
    return first, rest


def _names_a_file(argument: str) -> bool:
    """Also one with a function behind it, `FILE.py:function`."""
    return Path(argument).exists() or Path(argument.rpartition(":")[0] or argument).exists()
