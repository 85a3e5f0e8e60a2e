"""`rllm doctor`: what works here and what does not, each with what helps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.inference.servers.capabilities import Capabilities, Finding


def doctor(
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            "--endpoint",
            help="Base URL of an OpenAI-compatible server, up to and including /v1: say what it can do for training.",
            metavar="URL",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder or hub id to look at; with --base-url the model to ask for, else the first that is served.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="Where runs are to be written.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Where rllm gateway is to listen.", min=0, max=65535)] = 8080,
    as_json: AsJson = False,
) -> None:
    """Find out what keeps this machine, a model, or with --base-url a server from training, and what helps.

    The exit code is 0 if nothing does, and 1 otherwise.
    """
    from rllm.cli import terminal

    console = terminal.console(stderr=as_json)
    if endpoint is None:
        ok = _look_at_machine(console, model, run_dir, port, as_json=as_json)
    else:
        ok = _look_at_server(console, endpoint, model, api_key, as_json=as_json)
    if not ok:
        raise typer.Exit(1)


def _look_at_machine(console: Console, model: str | None, run_dir: Path, port: int, *, as_json: bool) -> bool:
    from rllm.cli.terminal import print_json
    from rllm.trainer.checkup import checkup

    findings = checkup(model=model, run_dir=run_dir, port=port)
    problems = sum(finding.needed and not finding.ok for finding in findings)
    for finding in findings:
        _show(console, finding)
    console.print("Nothing keeps it from training." if not problems else f"{problems} to mend before training.")
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings], "ok": not problems})
    return not problems


def _look_at_server(console: Console, endpoint: str, model: str | None, api_key: str | None, *, as_json: bool) -> bool:
    from rllm.cli.terminal import print_json
    from rllm.inference.servers.capabilities import probe

    found = probe(endpoint, model=model, api_key=api_key)
    _report(console, found)
    if as_json:
        print_json(found.to_dict())
    return found.can_train


def _report(console: Console, found: Capabilities) -> None:
    console.print(f"{found.url} ({found.model or 'no model'})", soft_wrap=True, markup=False)
    for finding in found.findings:
        _show(console, finding)
    if found.can_train:
        console.print("It can be trained with: model.engine=vllm vllm.url=" + found.url, soft_wrap=True, markup=False)
        return
    console.print("It cannot be trained with. A vLLM that can:", soft_wrap=True)
    console.print(f"  {_right_command()}", soft_wrap=True, markup=False)


def _show(console: Console, finding: Finding) -> None:
    console.print(f"  {_mark(finding):5} {finding.name:26} {finding.said}", soft_wrap=True, markup=False)
    if finding.fix:
        console.print(f"        fix: {finding.fix}", soft_wrap=True, markup=False)


def _mark(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "lacks" if finding.needed else "note"


def _right_command() -> str:
    """How a server that does all this is started by hand."""
    import shlex

    from rllm.inference.servers.command import ServeOptions, serve_arguments, serve_environment

    options = ServeOptions(model="MODEL", port=8000, served_name="policy")
    variables = [f"{name}={shlex.quote(value)}" for name, value in serve_environment(options, {}).items()]
    return " ".join([*variables, "vllm", *map(shlex.quote, serve_arguments(options))])
