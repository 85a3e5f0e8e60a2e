"""Help in which nothing stands behind an option that takes no value, where newer versions of Typer print `<bool>`, and long
names are broken, where Typer cuts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

from rllm.errors import ConfigError


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
    """A command with such help, which refuses an option that is repeated and takes one value."""

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
    """A command that has others below it, likewise."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _folding():
            super().format_help(ctx, formatter)
