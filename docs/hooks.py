"""Hooks of mkdocs: pages generated from code, links to them, and plain text for links to files outside this folder."""

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
"""Generated pages, by the section of reference.md that represents each of them in a clone."""


def on_config(config: Any) -> Any:
    """Add a page for each framework to the navigation."""
    folder = Path(config["docs_dir"], "frameworks")
    pages = sorted(f"frameworks/{page.name}" for page in folder.glob("*.md") if page.stem != "index")
    next(item for item in config["nav"] if "Frameworks" in item)["Frameworks"] += pages
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Adapt the links of a page: files outside this folder are not on the site, generated pages are."""
    inward = _REFERENCE.sub(lambda found: f"]({found[1]}{GENERATED[found[2]]})", markdown)
    return _OUTWARDS.sub(r"\1", inward)


def generated_pages() -> Mapping[str, str]:
    """Return each generated page by its path in this folder."""
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
    "A setting is an argument of a command (`optim.lr=1e-5`), an environment variable (`RLLM__OPTIM__LR=1e-5`), or a line in the",
    "file named by `--config`. If it is set in several places, the first of these takes precedence.",
    "",
    "## Environment variables",
    "",
    "| variable | meaning |",
    "| -- | -- |",
)
VARIABLES = {
    "RLLM__SECTION__KEY": "a setting, for every command that takes settings and for `AgentTrainer`",
    "RLLM_HOME": "folder of `DatasetRegistry`, `ProxyManager` and the key that marks your own runs; default `~/.rllm`",
    "RLLM_CACHE": "folder of the tiny policies of the demo, the examples and `rllm.testing`; default `~/.cache/rllm`",
    "RLLM_GATEWAY_API_KEY": "`--api-key` of `rllm gateway`, `rllm serve` and `rllm run`",
    "RLLM_UPSTREAM_API_KEY": "`--upstream-api-key` of `rllm gateway`; key of the server that `--base-url` of `rllm eval` and "
    "`rllm run` names",
    "RLLM_VIEW_TOKEN": "`--token` of `rllm view`",
    "RLLM_STORE": "trace store of the callback for a LiteLLM proxy; default `sqlite:///traces.db`",
    "RLLM_TRUSTED_RUNS": "run folders to trust like your own, separated as in `PATH`: they may be resumed, and may keep their "
    "traces elsewhere",
    "RLLM_TRUSTED_MODELS": "model folders (or their parents) and hub ids whose own code (`auto_map`) may run, separated as "
    "in `PATH`",
    "RLLM_PUBLIC_GATEWAY_URL": "address at which sandboxes on other machines reach the gateway, `http://ADDRESS:PORT`",
    "RLLM_RAY_LOGS": "if set, the output of processes on Ray is shown",
    "OPENAI_API_KEY": "key of servers without a key above: `vllm.url`, `teacher.url`, `rllm doctor --base-url`",
    "RAY_ADDRESS": "the Ray cluster, if no setting names one",
}
"""Environment variables and their meaning."""


def _setting_tables(items: Iterable[Any], docs: Mapping[str, str]) -> Iterator[str]:
    sections: dict[str, list[Any]] = {}
    for item in items:
        sections.setdefault(item.key.rpartition(".")[0], []).append(item)
    for section, own in sections.items():
        title = f"## `{section}`" if section else "## The run"
        yield from (title, "", *([docs[section], ""] if docs.get(section) and section else []), *_table(own), "")


def _table(items: Iterable[Any]) -> Iterator[str]:
    yield from ("| setting | default | values | meaning |", "| -- | -- | -- | -- |")
    for item in items:
        cells = (f"`{item.key}`", f"`{item.default!r}`", item.allowed, item.doc)
        yield "| " + " | ".join(_in_a_cell(str(cell)) for cell in cells) + " |"


def _commands() -> str:
    from typer.main import get_command

    from rllm.cli import app

    ends = "Exit codes: 0 for success, 1 for a failure, 2 for a usage error, 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."
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
    described = getattr(parameter, "show_default", None)
    default = described if isinstance(described, str) else parameter.default
    shown = "" if default is None or default is False or callable(default) else f"`{default}`"
    meaning = f"{_in_a_cell(getattr(parameter, 'help', None) or '')}{variable}"
    return f"| `{_in_a_cell(name + value)}` | {meaning} | {'required' if parameter.required else shown} |"


_MODEL = "model.path=Qwen/Qwen3-0.6B"
FEATURES = {
    "the embedded sampler": ["model.engine=embedded"],
    "vLLM as the sampler": ["model.engine=vllm"],
    "LoRA": ["model.lora_rank=8"],
    "quantized frozen weights": ["model.quantize=int8", "model.lora_rank=8"],
    "reference model for KL": ["algorithm.kl_coef=0.1"],
    "reference model in main memory": ["model.reference_offload=true", "algorithm.kl_coef=0.1"],
    "AdamW in main memory": ["optim.offload=true"],
    "matrix products in bfloat16": ["optim.autocast=true"],
    "gradient checkpointing": ["model.gradient_checkpointing=true"],
    "rollouts ahead of updates": ["rollout.max_staleness=1"],
    "rollouts on Ray": ["rollout.runner=ray"],
    "a teacher in addition to rewards": ["teacher.path=Qwen/Qwen3-8B", "algorithm.teacher_coef=0.1"],
    "verl's own policy loss": ["verl.policy_loss=vanilla"],
}
"""Features of a run, and the settings that enable them."""


def _capabilities() -> str:
    from rllm.algorithms import ALGORITHMS

    asked = {**{name: [f"algorithm.name={name}"] for name in sorted(ALGORITHMS)}, **FEATURES}
    return "\n".join(
        [
            "# Algorithms and backends",
            "",
            "Support of each backend. A backend refuses a setting that it does not support, by name and before it loads",
            "anything; no setting is ignored.",
            "",
            "| | settings | `backend=local` | `backend=verl` |",
            "| -- | -- | -- | -- |",
            *(
                f"| {name} | `{' '.join(overrides)}` | {verdict('local', overrides)} | {verdict('verl', overrides)} |"
                for name, overrides in asked.items()
            ),
            "",
        ]
    )


def verdict(backend: str, overrides: Iterable[str]) -> str:
    """Return `yes`, or `no` with the reason that the backend gives."""
    from rllm.backends.local.backend import LocalBackend
    from rllm.backends.verl.worker_config import check_settings
    from rllm.errors import ConfigError, MissingDependencyError
    from rllm.trainer.config import load_config

    config = load_config([f"backend={backend}", _MODEL, *overrides])
    try:
        {"local": LocalBackend.check, "verl": check_settings}[backend](config)
    except MissingDependencyError:
        return "yes"  # supported if verl is installed
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
    "rllm.sandbox.python",
    "rllm.tools.local_search",
    "rllm.tools.mcp_tool",
    "rllm.parser",
    "rllm.parser.tool_parser",
    "rllm.data",
    "rllm.data.dataset",
    "rllm.trainer",
    "rllm.trainer.config",
    "rllm.evaluation.evaluate",
    "rllm.evaluation.report",
    "rllm.tasks",
    "rllm.tasks.folder",
    "rllm.tasks.run",
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
"""Packages of the reference. A name that several of them export is documented in the first."""


def _api() -> str:
    lines = [
        "# Python",
        "",
        "Public names. A name that several packages export is documented in the first of them.",
        "",
    ]
    homes: dict[int, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## `{package}`", "", (module.__doc__ or "").strip().partition("\n\n")[0], ""]
        for name in public_names(module):
            here = f"{package}.{name}"
            home = homes.setdefault(id(getattr(module, name)), here)
            lines += [f"::: {here}" if home == here else f"`{name}`: see [`{home}`][{home}].", ""]
    return "\n".join(lines)


def public_names(module: ModuleType) -> list[str]:
    """Return the names in `__all__`, or else the classes and functions that the module defines; aliases come last."""
    declared = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if _is_own(value, module)
    ]
    names = [name for name in declared if not name.startswith("_")]
    return sorted(names, key=lambda name: getattr(getattr(module, name), "__name__", name) != name)


def _is_own(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__.startswith(module.__name__)


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
