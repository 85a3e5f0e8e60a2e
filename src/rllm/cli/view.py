"""`rllm view`: show runs in a browser, live; or export a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rllm.cli.terminal import print_line
from rllm.errors import counted

DEFAULT_PORT = 7070
_GC_THRESHOLD = 50_000
"""New objects after which the garbage collector runs.

Data read from a store stays in memory; with the default of 700, the collector takes a third of the time of listing
100,000 rollouts.
"""


def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders, folders of runs, or trace stores.", metavar="RUN", show_default="the folder runs"
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; a token is required unless it is a loopback address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="RLLM_VIEW_TOKEN",
            help="Token that callers must present; generated if one is required.",
            show_default=False,
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the run's report to this HTML file instead.", show_default=False)
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Show runs as a local web page: rewards, rollouts, every token, the batches of the optimiser, and timings.

    A live run is updated as it goes. Nothing is written, and no other host is contacted.
    """
    import gc

    from rllm.viewer.runs import Runs

    gc.set_threshold(_GC_THRESHOLD)
    sources = runs or ["runs"]
    if export is not None:
        _export(sources, export)
        return
    _serve(Runs(sources), host, port, token, browser)


def _export(sources: list[str], path: Path) -> None:
    from rllm.errors import ConfigError
    from rllm.viewer.export import export_report

    if len(sources) != 1:
        raise ConfigError(f"--export takes one run, and {len(sources)} were named")
    count = export_report(sources[0], path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {counted(count, 'rollout')} in full")


def _serve(runs: object, host: str, port: int, token: str | None, browser: bool) -> None:
    import secrets
    import webbrowser
    from urllib.parse import urlencode

    from rllm._runtime.network import is_loopback
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import bind, serve, url_of
    from rllm.viewer.app import create_app
    from rllm.viewer.render import url as path_of
    from rllm.viewer.runs import Runs

    assert isinstance(runs, Runs)
    found = runs.all()
    if len(found) == 1:
        _ = found[0].rows() or found[0].store  # errors are raised now, not on a page
    if not token:  # an empty one, as of an unset variable, would admit everyone
        token = None if is_loopback(host) else secrets.token_urlsafe(16)
    app = create_app(runs, token=token)
    listener = bind(host, port, of="viewer")
    path = path_of("run", found[0].name) if len(found) == 1 else "/"
    query = f"?{urlencode({'token': token})}" if token else ""
    address = f"{url_of(listener, host)}{path}{query}"
    print_line(f"{counted(len(found), 'run')}: {address}  (Ctrl-C ends)")
    if browser:
        webbrowser.open(address)
    serve(app, listener, GatewayConfig(shutdown_timeout_s=1.0))
