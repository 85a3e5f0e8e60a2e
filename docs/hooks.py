"""Hooks of mkdocs: the pages made from code, links to these, and links out of this folder as mere text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_OUTWARDS = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|examples|tests|benchmarks|[A-Z]+\.md)[^)]*\)")
_REFERENCE = re.compile(r"\]\(((?:\.\./)*)reference\.md#([\w-]+)\)")
GENERATED = {
    "settings": "reference/settings.md",
    "commands": "reference/commands.md",
    "algorithms-and-backends": "reference/capabilities.md",
    "python": "reference/api.md",
}
"""The pages made from code, by the section of reference.md that stands for each of them in a clone."""


def on_config(config: Any) -> Any:
    """mkdocs reads its settings. Every page of a framework is in the navigation."""
    folder = Path(config["docs_dir"], "frameworks")
    pages = sorted(f"frameworks/{page.name}" for page in folder.glob("*.md") if page.stem != "index")
    next(item for item in config["nav"] if "Frameworks" in item)["Frameworks"] += pages
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs asks for more pages."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Adapt the links of a page: files beside this folder are not on the site, and the pages made from code are."""
    inward = _REFERENCE.sub(lambda found: f"]({found[1]}{GENERATED[found[2]]})", markdown)
    return _OUTWARDS.sub(r"\1", inward)


def generated_pages() -> Mapping[str, str]:
    """Every page that is made from code, by its path in this folder."""
    return {
        "reference/settings.md": _settings(),
        "reference/commands.md": _commands(),
        "reference/capabilities.md": _capabilities(),
        "reference/api.md": _api(),
    }


def _settings() -> str:
    from rllm.algorithms import ALGORITHMS
    from rllm.config.reference import section_docs, settings

    docs = section_docs()
    lines = ["# Settings", "", docs[""], "", "`rllm config` prints the same, and `rllm config KEY` a part of it.", ""]
    lines += [*_ENVIRONMENT, *(f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()), ""]
    common = [item for item in settings(ALGORITHMS) if not item.key.startswith("algorithm.") or not item.optional]
    lines += _setting_tables(common, docs)
    for name in sorted(ALGORITHMS):
        own = [item for item in settings(ALGORITHMS, name) if item.key.startswith("algorithm.") and item.optional]
        if own:
            lines += [f"## `algorithm.name={name}`", "", *_table(own), ""]
    return "\n".join(lines)


_ENVIRONMENT = (
    "A setting is written as `optim.lr=1e-5` behind a command, or is a variable of the environment, `RLLM__OPTIM__LR=1e-5`, or a",
    "line of the file of `--config`; where several say it, the first of these counts.",
    "",
    "## The environment",
    "",
    "| variable | what reads it |",
    "| -- | -- |",
)
VARIABLES = {
    "RLLM__SECTION__KEY": "a setting, of any command that takes settings and of `AgentTrainer`",
    "RLLM_HOME": "where `DatasetRegistry` and `ProxyManager` keep their files, and the key that marks your own runs; `~/.rllm` without it",
    "RLLM_CACHE": "where the tiny policies of the demo, the examples and `rllm.testing` are kept; `~/.cache/rllm` without it",
    "RLLM_GATEWAY_API_KEY": "`rllm gateway`, `rllm serve` and `rllm run`, as `--api-key`",
    "RLLM_GATEWAY_ADMIN_KEY": "`rllm gateway`, as `--admin-key`",
    "RLLM_UPSTREAM_API_KEY": "`rllm gateway`, as `--upstream-api-key`; the key of the server of `rllm eval --base-url` and `rllm run --base-url`",
    "RLLM_VIEW_TOKEN": "`rllm view`, as `--token`",
    "RLLM_STORE": "the callback for a LiteLLM proxy: where traces are kept; `sqlite:///traces.db` without it",
    "RLLM_TRUSTED_RUNS": "folders of runs to trust as if you had begun them yourself, separated as in `PATH`: these may be resumed, and "
    "may keep their traces elsewhere",
    "RLLM_TRUSTED_MODELS": "model folders (or folders above them) and hub ids whose own code (`auto_map`) may run, separated as in `PATH`",
    "RLLM_RAY_LOGS": "set to anything, it shows what processes on Ray print",
    "OPENAI_API_KEY": "the key of servers that have none of their own above: `vllm.url`, `teacher.url`, `rllm doctor --base-url`",
    "RAY_ADDRESS": "the Ray cluster, where no setting names one",
}
"""Variables of the environment, and what they mean."""


def _setting_tables(items: Iterable[Any], docs: Mapping[str, str]) -> Iterator[str]:
    sections: dict[str, list[Any]] = {}
    for item in items:
        sections.setdefault(item.key.rpartition(".")[0], []).append(item)
    for section, own in sections.items():
        title = f"## `{section}`" if section else "## The run"
        yield from (title, "", *([docs[section], ""] if docs.get(section) and section else []), *_table(own), "")


def _table(items: Iterable[Any]) -> Iterator[str]:
    yield from ("| setting | default | may be | meaning |", "| -- | -- | -- | -- |")
    for item in items:
        cells = (f"`{item.key}`", f"`{item.default!r}`", item.allowed, item.doc)
        yield "| " + " | ".join(_in_a_cell(str(cell)) for cell in cells) + " |"


def _commands() -> str:
    from typer.main import get_command

    from rllm.cli import app

    ends = "They end with 0, with 1 for what failed, 2 for what the user wrote, 130 for Ctrl-C, 143 for SIGTERM and 129 for SIGHUP."
    return "\n".join(["# Commands", "", ends, "", *_command(get_command(app), ("rllm",))])


def _command(command: Any, names: tuple[str, ...]) -> Iterator[str]:
    subcommands = getattr(command, "commands", {})
    if len(names) > 1:
        yield from ("#" * len(names) + f" `{' '.join(names)}`", "", (command.help or "").strip(), "")
        options = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        if options:
            yield from ("| option | meaning | default |", "| -- | -- | -- |")
        for parameter in options:
            yield _option(parameter)
        yield ""
    for name, child in sorted(subcommands.items()):
        if not child.hidden:
            yield from _command(child, (*names, name))


def _option(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
    value = f" {parameter.metavar}" if is_option and parameter.metavar else ""
    variable = f" By default `${parameter.envvar}`." if parameter.envvar else ""
    told = getattr(parameter, "show_default", None)
    default = told if isinstance(told, str) else parameter.default
    shown = "" if default is None or default is False or callable(default) else f"`{default}`"
    meaning = f"{_in_a_cell(getattr(parameter, 'help', None) or '')}{variable}"
    return f"| `{_in_a_cell(name + value)}` | {meaning} | {'required' if parameter.required else shown} |"


_MODEL = "model.path=Qwen/Qwen3-0.6B"
FEATURES = {
    "the embedded sampler": ["model.engine=embedded"],
    "vLLM as the sampler": ["model.engine=vllm"],
    "LoRA": ["model.lora_rank=8"],
    "a reference for the KL": ["algorithm.kl_coef=0.1"],
    "the reference in main memory": ["model.reference_offload=true", "algorithm.kl_coef=0.1"],
    "AdamW in main memory": ["optim.offload=true"],
    "products in bfloat16": ["optim.autocast=true"],
    "gradient checkpointing": ["model.gradient_checkpointing=true"],
    "rollouts ahead of updates": ["rollout.max_staleness=1"],
    "rollouts on Ray": ["rollout.runner=ray"],
    "a teacher beside the rewards": ["teacher.path=Qwen/Qwen3-8B", "algorithm.teacher_coef=0.1"],
    "verl's own policy loss": ["verl.policy_loss=vanilla"],
}
"""What a run may ask for, and the settings that ask for it."""


def _capabilities() -> str:
    from rllm.algorithms import ALGORITHMS

    asked = {**{name: [f"algorithm.name={name}"] for name in sorted(ALGORITHMS)}, **FEATURES}
    return "\n".join(
        [
            "# Algorithms and backends",
            "",
            "What each backend says to a configuration that asks for it, before anything is loaded. What a backend cannot do",
            "is refused by name, never ignored.",
            "",
            "| | settings | `backend=local` | `backend=verl` |",
            "| -- | -- | -- | -- |",
            *(
                f"| {what} | `{' '.join(overrides)}` | {verdict('local', overrides)} | {verdict('verl', overrides)} |"
                for what, overrides in asked.items()
            ),
            "",
        ]
    )


def verdict(backend: str, overrides: Iterable[str]) -> str:
    """`yes`, or why not in the backend's own words."""
    from rllm.backends.local.backend import LocalBackend
    from rllm.backends.verl.worker_config import check_settings
    from rllm.errors import ConfigError, MissingDependencyError
    from rllm.trainer.config import load_config

    config = load_config([f"backend={backend}", _MODEL, *overrides])
    try:
        {"local": LocalBackend.check, "verl": check_settings}[backend](config)
    except MissingDependencyError:
        return "yes"  # there it is
    except ConfigError as error:
        return f"no: {_in_a_cell(str(error))}"
    return "yes"


PACKAGES = (
    "rllm",
    "rllm.types",
    "rllm.errors",
    "rllm.sdk",
    "rllm.agents",
    "rllm.environments",
    "rllm.workflows",
    "rllm.rewards",
    "rllm.rewards.scoring",
    "rllm.tools",
    "rllm.tools.sandbox",
    "rllm.tools.local_search",
    "rllm.tools.mcp_tool",
    "rllm.parser",
    "rllm.parser.tool_parser",
    "rllm.data",
    "rllm.data.order",
    "rllm.trainer",
    "rllm.trainer.config",
    "rllm.evaluation.evaluate",
    "rllm.evaluation.report",
    "rllm.evaluation.pass_at_k",
    "rllm.engine",
    "rllm.engine.runner",
    "rllm.inference.engine",
    "rllm.inference.openai_engine",
    "rllm.inference.local",
    "rllm.capture",
    "rllm.gateway.server",
    "rllm.gateway.upstream",
    "rllm.gateway.config",
    "rllm.store",
    "rllm.store.base",
    "rllm.store.memory",
    "rllm.telemetry",
    "rllm.registry",
    "rllm.algorithms.base",
    "rllm.algorithms.batch",
    "rllm.backends.base",
    "rllm.tracking.base",
    "rllm.testing",
    "rllm.testing.tiny_policy",
)
"""Whose public names are shown, each where it comes first."""


def _api() -> str:
    lines = ["# Python", "", "What users import. A name that several packages have is told in the first of them.", ""]
    told: dict[int, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## `{package}`", "", (module.__doc__ or "").strip().partition("\n\n")[0], ""]
        for name in public_names(module):
            here = f"{package}.{name}"
            home = told.setdefault(id(getattr(module, name)), here)
            lines += [f"::: {here}" if home == here else f"`{name}`: see [`{home}`][{home}].", ""]
    return "\n".join(lines)


def public_names(module: ModuleType) -> list[str]:
    """What a module says is public, or else the classes and functions that it defines; other names of a thing come last."""
    declared = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if _is_own(value, module)
    ]
    names = [name for name in declared if not name.startswith("_")]
    return sorted(names, key=lambda name: getattr(getattr(module, name), "__name__", name) != name)


def _is_own(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__.startswith(module.__name__)


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
