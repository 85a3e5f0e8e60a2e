"""`rllm list`: names that other commands take."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rllm.cli import terminal
from rllm.cli.options import OnlyJson
from rllm.errors import ConfigError
from rllm.registry import suggestion
from rllm.sandbox.base import backend_names, open_backend
from rllm.types import JSONObject


def list_names(
    kind: Annotated[
        str | None, typer.Argument(help="agents, algorithms, benchmarks, envs or sandboxes.", show_default=False)
    ] = None,
    scheme: Annotated[
        str | None, typer.Argument(help="With envs: print all names of this scheme.", show_default=False)
    ] = None,
    as_json: OnlyJson = False,
) -> None:
    """List names of agents, algorithms, benchmarks, schemes of environments or sandboxes, with a line about each."""
    if kind is None:
        raise ConfigError(f"rllm list: name one of {', '.join(_KINDS)}")
    if kind not in _KINDS:
        raise ConfigError(f"rllm list {kind}: unknown list; {suggestion(kind, _KINDS)}")
    if scheme is not None and kind != "envs":
        raise ConfigError(f"rllm list {kind} {scheme}: only envs have further names; leave {scheme} out")
    from rllm.environments.named import names_of

    rows = list(_KINDS[kind]()) if scheme is None else [{"name": name} for name in names_of(scheme)]
    if as_json:
        terminal.print_json({kind: rows})
        return
    terminal.print_table(rows[0], [map(_cell, row.values()) for row in rows])


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _agents() -> Iterator[JSONObject]:
    from rllm import agents
    from rllm.tasks.agents.named import agent_names

    for name, about in agent_names().items():
        yield {"name": name, "works": "in sandboxes", "about": about}
    for name in agents.__all__:
        found = getattr(agents, name)
        ours = issubclass(found, agents.BaseAgent) and found.__module__.startswith("rllm.agents.")
        if ours and not inspect.isabstract(found):
            yield {
                "name": f"rllm.agents:{name}",
                "works": "in environments",
                "about": (found.__doc__ or "").partition("\n")[0],
            }


def _algorithms() -> Iterator[JSONObject]:
    from rllm.algorithms import ALGORITHMS

    for name, path in sorted(ALGORITHMS.items()):
        module, _, kind = path.partition(":")
        spec = find_spec(module)  # not imported, since it may need torch
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
        yield {"name": name, "about": (ast.get_docstring(found) or "").partition("\n")[0]}


def _benchmarks() -> Iterator[JSONObject]:
    from rllm.data.benchmarks import BENCHMARKS

    for name, benchmark in BENCHMARKS.items():
        splits = [split for split in ("train", "test") if benchmark.generate is not None or split in benchmark.splits]
        tasks = benchmark.hub_id or "generated"
        yield {"name": name, "tasks": tasks, "splits": splits, "metric": benchmark.metric, "about": benchmark.about}


def _envs() -> Iterator[JSONObject]:
    from rllm.environments.named import SCHEMES

    for name, scheme in SCHEMES.items():
        extra = f"rllm[{scheme.extra}]" if scheme.extra else ""
        yield {"scheme": name, "extra": extra, "installed": scheme.installed, "about": scheme.about}


def _sandboxes() -> Iterator[JSONObject]:
    for name in backend_names():
        works = "yes"
        try:
            open_backend(name)
        except (ConfigError, ImportError) as error:
            works = f"no: {str(error).removeprefix(f'sandbox={name}: ')}"
        yield {"name": name, "works here": works}


_KINDS: dict[str, Callable[[], Iterator[JSONObject]]] = {
    "agents": _agents,
    "algorithms": _algorithms,
    "benchmarks": _benchmarks,
    "envs": _envs,
    "sandboxes": _sandboxes,
}
