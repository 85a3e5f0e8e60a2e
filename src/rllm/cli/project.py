"""`rllm init`, `rllm config` and `rllm doctor`: start a project, look up settings, and check the machine."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rllm.cli import terminal
from rllm.cli.options import AsJson, OnlyJson, optional
from rllm.errors import ConfigError, counted

TEMPLATE = Path(__file__).with_name("new_project")
RENAMED = {"gitignore": ".gitignore"}
"""Template files that would have an effect in this repository under their final name."""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the project; created if needed.", metavar="DIR")] = Path(),
    force: Annotated[
        bool,
        typer.Option("--force", help="Write into a folder with files; files of the same names are replaced."),
    ] = False,
) -> None:
    """Create a project: an agent and its reward, tasks, tests without a model, and settings."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(f"{str(folder)!r} is not empty: name another folder, or give --force")
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            target = folder / source.relative_to(TEMPLATE).with_name(RENAMED.get(source.name, source.name))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"{str(target)!r} cannot be written ({error.strerror or error}): name another folder"
                ) from error
            print(target)
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nNext: {where}python -m pytest (pip install pytest), then rllm doctor; then read README.md.")


def config(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys, sections (optim, rollout.group_size) or words to look up; or a YAML file to check.",
            metavar="KEY|FILE",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Algorithm whose settings to show.")] = "grpo",
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print a JSON Schema of settings files, for editors.")
    ] = False,
    as_json: OnlyJson = False,
) -> None:
    """Show every setting with its meaning and default, as a file to start from; or check a file.

    For completion in an editor: rllm config --json-schema > rllm.schema.json
    """
    words = what or []
    if json_schema:
        from rllm.algorithms import ALGORITHMS
        from rllm.config.reference import json_schema as schema_of

        print(json.dumps(schema_of(ALGORITHMS), indent=2))
    elif any(word.endswith((".yaml", ".yml")) or Path(word).is_file() for word in words):
        if len(words) > 1:
            raise ConfigError(f"{' '.join(words)!r}: name one file, or keys")
        _check(Path(words[0]), as_json=as_json)
    else:
        _show(words, algorithm, as_json=as_json)


def _show(words: list[str], algorithm: str, *, as_json: bool) -> None:
    from rllm.algorithms import ALGORITHMS
    from rllm.config.reference import HINT, as_yaml, matching, section_docs, settings

    found = settings(ALGORITHMS, algorithm)
    if words:
        found = matching(found, words)
    if not found:
        raise ConfigError(
            f"no setting has {' or '.join(map(repr, words))} in its key or meaning: `rllm config` lists them all"
        )
    if as_json:
        terminal.print_json({"settings": [asdict(item) for item in found]})
        return
    docs = section_docs()
    print("" if words else f"{HINT}\n# {docs['']} These are the defaults; leave out what you do not change.\n")
    print(as_yaml(found, docs), end="")


def _check(path: Path, *, as_json: bool) -> None:
    from rllm.config.yaml_file import leaves
    from rllm.trainer.config import load_config
    from rllm.trainer.settings import check_roles, make_algorithm

    loaded = load_config(path)
    check_roles(loaded, make_algorithm(loaded))
    changed = dict(leaves(loaded.model_dump(mode="json", exclude_defaults=True)))
    if as_json:
        terminal.print_json({"valid": True, "settings": changed})
        return
    print(f"{path} is valid; it {'sets' if changed else 'changes nothing'}")
    for key, value in changed.items():
        print(f"  {key} = {value}")


def doctor(
    endpoint: Annotated[
        str | None,
        optional(
            "Base URL of an OpenAI-compatible server, with /v1: check what it supports for training.",
            "--base-url",
            "--endpoint",
            metavar="URL",
        ),
    ] = None,
    model: Annotated[
        str | None,
        optional("Model folder or hub id to check; with --base-url the model to request, by default the first served."),
    ] = None,
    api_key: Annotated[str | None, optional("Key of the server.", envvar="OPENAI_API_KEY")] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder for runs, to check.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port for `rllm gateway`, to check.", min=0, max=65535)] = 8080,
    as_json: AsJson = False,
) -> None:
    """Check this machine, a model, or with --base-url a server for problems with training, each with a fix.

    The exit code is 0 without problems, and 1 otherwise.
    """
    from rllm.trainer.checkup import run_checks

    console = terminal.console(stderr=as_json)
    found = run_checks(server=endpoint, api_key=api_key, model=model, run_dir=run_dir, port=port)
    if found.url is not None:
        console.print(f"{found.url} ({found.model or 'no model'})", soft_wrap=True, markup=False)
    for finding in found.findings:
        mark = "ok" if finding.ok else "lacks" if finding.needed else "note"
        console.print(f"  {mark:5} {finding.name:26} {finding.detail}", soft_wrap=True, markup=False)
        if finding.fix:
            console.print(f"        fix: {finding.fix}", soft_wrap=True, markup=False)
    if found.url is None:
        verdict = (
            "Ready to train." if found.ok else f"{counted(len(found.problems), 'problem')} to fix before training."
        )
    elif found.ok:
        verdict = f"Train with: model.engine=vllm vllm.url={found.url}"
    else:
        from rllm.inference.servers.command import ServeOptions, serve_arguments, serve_environment

        options = ServeOptions(model="MODEL", port=8000, served_name="policy")
        variables = [f"{name}={shlex.quote(value)}" for name, value in serve_environment(options, {}).items()]
        command = " ".join([*variables, "vllm", *map(shlex.quote, serve_arguments(options))])
        verdict = f"It does not support training. A vLLM that does:\n  {command}"
    console.print(verdict, soft_wrap=True, markup=False)
    if as_json:
        terminal.print_json(found.to_dict())
    if not found.ok:
        raise typer.Exit(1)
