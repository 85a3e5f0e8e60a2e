"""Command classes: help without noise, refused repetitions, hints for settings, and `--resume` without a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from rllm.errors import ConfigError
from rllm.registry import closest


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


@contextmanager
def _folding() -> Iterator[None]:
    from rich import columns
    from rich.table import Table
    from typer import rich_utils

    class FoldingTable(Table):
        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(*cells, **options)
            for column in self.columns:
                column.overflow = "fold"

    modules: list[Any] = [columns, rich_utils]
    for module in modules:
        module.Table = FoldingTable
    try:
        yield
    finally:
        for module in modules:
            module.Table = Table


class PlainCommand(TyperCommand):
    """Command that refuses a repeated option which takes one value.

    Its help shows no type for flags, where newer versions of Typer print `<bool>`, and folds long names instead of
    cutting them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._refuse_repeated(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_repeated(self, ctx: Any, args: list[str]) -> None:
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for param, count in Counter(given).items():
            single = param.param_type_name == "option" and not (param.multiple or param.is_flag or param.count)
            if count > 1 and single:
                remedy = "join the files into one" if param.opts[0] in ("--data", "--val") else "leave the others out"
                raise ConfigError(
                    f"{param.opts[0]} is given {count} times, and `{ctx.command_path}` takes one value: {remedy}"
                )

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _folding():
            super().format_help(ctx, formatter)


class PlainGroup(TyperGroup):
    """Command group with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _folding():
            super().format_help(ctx, formatter)


_SUCH_AS = {
    "eval": "sampling.max_tokens=512; `rllm eval -h` shows both",
    "serve": "model.dtype=bfloat16; `rllm serve -h` shows both",
}
"""Examples for commands that take few settings; the others take all that `rllm config` lists."""


class SettingsCommand(PlainCommand):
    """Command with an argument `settings`: explains their syntax if one is written like an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(param.name == "settings" for param in self.params):
            options = takewhile("--".__ne__, args)
            self._check_options([argument.partition("=")[0] for argument in options if argument.startswith("--")])
        return super().parse_args(ctx, args)

    def _check_options(self, names: Sequence[str]) -> None:
        known = ["--help", *(option for param in self.params for option in (*param.opts, *param.secondary_opts))]
        for name in names:
            if name not in known and closest(name, known, cutoff=0.75) is None:
                every = f"num_steps=100; `rllm config` lists them, and `rllm {self.name} -h` the options"
                raise ConfigError(
                    f"{name} is not an option of rllm {self.name}: settings are written without dashes, such as "
                    f"{_SUCH_AS.get(str(self.name), every)}"
                )


class Resumable(SettingsCommand):
    """Command that can resume a run; `--resume` without a folder raises an error that lists the runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[-1:] == ["--resume"]:
            from rllm.trainer.run_folder import way_to_a_run

            raise ConfigError(f"--resume names no run; {way_to_a_run(Path('runs'))}")
        return super().parse_args(ctx, args)
