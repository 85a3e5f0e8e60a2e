"""Options shared by commands, options generated from config classes, and the class of commands."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from rllm.errors import ConfigError
from rllm.registry import closest, field_docs

SPELLINGS = {
    "hold_timeout_s": "--hold-s",
    "total_timeout_s": "--total-s",
    "timeout_s": "--timeout",
    "max_output_bytes": "--max-output",
}
"""Options that are not spelled like their field."""
NOT_OPTIONS = {"session_ids_admit"}
"""Fields that only runs set."""
_VARIABLES = {"api_key": "RLLM_GATEWAY_API_KEY"}
_DEFAULTS = {"port": 8080}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a config dataclass by an option for each field.

    An option has the name, type and default of its field, and the field's docstring as help, unless the field's type
    is annotated with an option. The dataclass checks the values. `Annotated[Config, "one", "other"]` takes only these
    fields.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    configs: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind, *chosen = get_args(hints[parameter.name]) or (hints[parameter.name],)
        if isinstance(kind, type) and is_dataclass(kind):
            options = [option for option in _options_of(kind) if not chosen or option.name in chosen]
            configs[parameter.name] = kind, [option.name for option in options]
            parameters += options
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: object) -> None:
        for name, (kind, names) in configs.items():
            with as_typed(**{field: spelling_of(field) for field in names}):
                values[name] = kind(**{field: values.pop(field) for field in names})
        command(**values)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    return run


def _options_of(config: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        if field.name in NOT_OPTIONS:
            continue
        annotation, default = hints[field.name], _DEFAULTS.get(field.name, field.default)
        if get_origin(annotation) is not Annotated:
            spelling = spelling_of(field.name)
            names = f"{spelling}/--no-{spelling.removeprefix('--')}" if default is True else spelling
            variable = _VARIABLES.get(field.name)
            option = typer.Option(
                names, help=field_docs(config)[field.name], envvar=variable, show_default=default is not None
            )
            annotation = Annotated[annotation, option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def spelling_of(field: str) -> str:
    """Return the option of a field of a config class."""
    return SPELLINGS.get(field, f"--{field.replace('_', '-')}")


@contextmanager
def as_typed(**options: str) -> Iterator[None]:
    """Replace names of settings, with their section, and arguments in error messages by the command's options."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for argument, option in options.items():
            text = re.sub(rf"\b(?:[a-z_]+\.)?{argument}(?=[:=,) ])", option, text)
        raise ConfigError(text) from error


def above_zero(seconds: float | None) -> float | None:
    """Check the value of an option in seconds; the callback of such options."""
    if seconds is not None and not seconds > 0:
        raise typer.BadParameter(f"{seconds:g}: use a number of seconds above 0")
    return seconds


def optional(help: str, *names: str, **settings: Any) -> Any:
    """Return a Typer option that shows no default."""
    return typer.Option(*names, help=help, show_default=False, **settings)


Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings, such as optim.lr=1e-5; `rllm config` lists them. They override the environment "
        "(RLLM__OPTIM__LR=1e-5), which overrides --config.",
        metavar="KEY=VALUE",
    ),
]
Reward: TypeAlias = Annotated[
    str | None,
    optional(
        "Reward function, called with the task and the agent's result; or judge:RUBRIC.yaml. Without it the agent "
        "returns its reward.",
        metavar="FILE.py:function",
    ),
]
Env: TypeAlias = Annotated[
    str | None,
    optional(
        "Environment by name, which has tasks, rewards and an agent; `rllm list envs` prints the schemes.",
        metavar="SCHEME:NAME?key=value&...",
    ),
]
SandboxAgent: TypeAlias = Annotated[
    str | None,
    optional(
        "Agent that works on task folders in sandboxes: a name of `rllm list agents`, or FILE.py:function; the tasks "
        "are then the first argument.",
        "--agent",
    ),
]
Sandbox: TypeAlias = Annotated[
    str | None,
    optional("Kind of the sandboxes of task folders, by default local; `rllm list sandboxes` prints all.", "--sandbox"),
]
Split: TypeAlias = Annotated[str | None, optional("Split of the data to use, if it has several: train, test, ...")]
ValSplit: TypeAlias = Annotated[str | None, optional("Split of --val to use, if it has several.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON on stdout at the end.")]
OnlyJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]


_SETTING = re.compile(r"\+{0,2}[\w.]+=")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the commands that train."""

    settings: Settings = None
    val: Annotated[
        str | None, optional("Held-out tasks or conversations, for evaluation only: a file, a name or a hub id.")
    ] = None
    split: Split = None
    val_split: ValSplit = None
    model: Annotated[str | None, optional("Model folder or hub id; the same as model.path=...")] = None
    config: Annotated[Path | None, optional("YAML file of settings.")] = None
    resume: Annotated[Path | None, optional("Run folder to resume, with its settings.")] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print every setting and its origin, and exit.")
    ] = False
    as_json: AsJson = False


def leading_setting(first: str | None, settings: list[str] | None) -> tuple[str | None, list[str]]:
    """Separate an optional argument from settings; if it is missing, the first setting is in its place."""
    rest = list(settings or [])
    files = [] if first is None else [first, first.rpartition(":")[0] or first]
    if first is not None and _SETTING.match(first) and not any(Path(file).exists() for file in files):
        return None, [first, *rest]
    return first, rest


CheckpointOfRun: TypeAlias = Annotated[
    str | None,
    optional(
        "Checkpoint, if the model is a run folder: latest (the default), best, or a name such as step-000020.",
        "--checkpoint",
    ),
]
Server: TypeAlias = Annotated[
    str | None,
    optional(
        "OpenAI-compatible server with the model; its key is RLLM_UPSTREAM_API_KEY or OPENAI_API_KEY.",
        "--base-url",
        "--upstream",
        metavar="URL",
    ),
]
ModelOrName: TypeAlias = Annotated[
    str | None,
    optional("Model folder, hub id, or the folder of a run; with --base-url the model's name on the server."),
]
ServerKind: TypeAlias = Annotated[
    Literal["vllm", "openai"],
    typer.Option(help="vllm: the server takes extra fields (also SGLang, rllm). openai: it rejects unknown fields."),
]
Tokenizer: TypeAlias = Annotated[
    str | None,
    optional("Folder or hub id of the served model: later turns then continue from exactly the sampled tokens."),
]
ChatTemplateFile: TypeAlias = Annotated[
    Path | None,
    optional("Jinja file that the server uses instead of the model's template; needs --tokenizer.", "--chat-template"),
]
DEFAULT_STORE = "sqlite:///traces.db"
Store: TypeAlias = Annotated[str, typer.Option("--store", help="Store of traces: a file or a URL.", metavar="STORE")]
GatewayKey: TypeAlias = Annotated[
    str | None, optional("Key that clients of the gateway must present.", envvar=_VARIABLES["api_key"])
]


class StrictCommand(TyperCommand):
    """Command that refuses repeated options, and settings that are written like options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(param.name == "settings" for param in self.params):
            self._check_names(args)
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for param, count in Counter(given).items():
            if count > 1 and isinstance(param, TyperOption) and not (param.multiple or param.is_flag):
                raise ConfigError(f"{param.opts[0]} is given {count} times: `{ctx.command_path}` takes one value")
        return super().parse_args(ctx, args)

    def _check_names(self, args: list[str]) -> None:
        known = ["--help", *(option for param in self.params for option in (*param.opts, *param.secondary_opts))]
        for argument in takewhile("--".__ne__, args):
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in known and closest(name, known, cutoff=0.75) is None:
                raise ConfigError(
                    f"{name} is not an option of rllm {self.name}: settings are written without dashes, such as "
                    f"model.dtype=bfloat16; `rllm {self.name} -h` lists the options, and `rllm config` the settings"
                )
