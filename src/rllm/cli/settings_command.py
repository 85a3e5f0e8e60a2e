"""A command that takes settings tells who writes one like an option how settings are written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from rllm.cli.plain_help import PlainCommand
from rllm.errors import ConfigError
from rllm.registry import closest

_SUCH_AS = {
    "eval": "sampling.max_tokens=512; `rllm eval -h` shows both",
    "serve": "model.dtype=bfloat16; `rllm serve -h` shows both",
}
"""What commands that take few settings say of them; the others take all that `rllm config` lists."""


class SettingsCommand(PlainCommand):
    """Looks at the options before they are read, where there is an argument `settings`."""

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
                    f"{name} is no option of rllm {self.name}: settings are written without dashes, such as "
                    f"{_SUCH_AS.get(str(self.name), every)}"
                )
