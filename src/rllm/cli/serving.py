"""`rllm gateway`, `rllm serve` and `rllm view`: capture calls, serve a model, and show runs in a browser."""

from __future__ import annotations

import asyncio
import secrets
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from rllm.cli.options import (
    DEFAULT_STORE,
    ChatTemplateFile,
    CheckpointOfRun,
    ServerKind,
    Store,
    Tokenizer,
    above_zero,
    as_typed,
    optional,
    with_options,
)
from rllm.cli.terminal import loading, print_line
from rllm.errors import ConfigError, InferenceError, counted
from rllm.gateway.config import GatewayConfig, PoolConfig
from rllm.store.maintenance import Retention

if TYPE_CHECKING:
    from rllm.gateway.upstream import Upstream, UpstreamPool
    from rllm.trainer.config import TrainConfig


_SWITCH_INTERVAL_S = 0.05
"""Time for which a thread keeps the interpreter's lock while another waits for it; Python's own is 0.005."""


@with_options
def gateway(
    upstream: Annotated[
        list[str],
        optional("Base URL of the OpenAI-compatible server to forward to; repeat it for each replica.", metavar="URL"),
    ],
    config: GatewayConfig,
    limits: PoolConfig,
    retention: Retention,
    store: Store = DEFAULT_STORE,
    upstream_api_key: Annotated[str | None, optional("Key for the upstream.", envvar="RLLM_UPSTREAM_API_KEY")] = None,
    model: Annotated[
        str | None, optional("Model to request from the upstream, instead of the one that agents name.")
    ] = None,
    upstream_kind: ServerKind = "vllm",
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplateFile = None,
    silence_s: Annotated[
        float, typer.Option(help="Seconds of silence after which a call to a replica fails.", callback=above_zero)
    ] = 600.0,
) -> None:
    """Capture every call of any agent exactly, in front of any OpenAI-compatible server."""
    from rllm.cli.inputs import token_prompts
    from rllm.gateway.app import create_app
    from rllm.gateway.server import bind, serve, url_of
    from rllm.gateway.upstream import HTTPUpstream, UpstreamPool
    from rllm.store import open_store
    from rllm.store.maintenance import pruning

    config = replace(config, otel=config.otel or config.otel_response_ids)
    connect = partial(
        HTTPUpstream,
        api_key=upstream_api_key,
        model=model,
        kind=upstream_kind,
        tokens=token_prompts(tokenizer, chat_template),
        read_timeout_s=silence_s,
    )
    with as_typed(upstream="--upstream"):
        pool = UpstreamPool(upstream, connect, limits)
    with closing(bind(config.host, config.port)) as listener, closing(open_store(store)) as traces:
        app = create_app(traces, pool, config)
        _greet(url_of(listener, config.host), pool, store, needs_key=config.api_key is not None)
        with pruning(traces, retention):
            # Most work is the event loop's: handing the lock to the store's thread more often costs up to a tenth more.
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            serve(app, listener, config)
    print_line("rllm gateway: stopped; every acknowledged call is in the store")


def _greet(url: str, pool: UpstreamPool, store: str, *, needs_key: bool) -> None:
    """Print addresses, next steps, and problems of replicas that get calls nevertheless; those down are logged."""

    async def check() -> list[str | BaseException | None]:
        try:
            return await asyncio.gather(*(replica.check() for replica in pool.replicas), return_exceptions=True)
        finally:
            await pool.close()  # The server opens its own connections, in its own event loop.

    key = "KEY" if needs_key else "anything"
    print_line(
        f"rllm gateway listens on {url}\n"
        f"  agents     base_url={url}/sessions/SESSION/v1  api_key={key}\n"
        f"             (choose a SESSION for each rollout; {url}/v1 gives each call its own)\n"
        f"  traces     {url}/sessions/SESSION/traces, kept in {store}\n"
        f"  forwards   to {', '.join(replica.address for replica in pool.replicas)}\n"
        f"  Ctrl-C stops it after calls in flight."
    )
    for replica, problem in zip(pool.replicas, asyncio.run(check()), strict=True):
        if replica.up and isinstance(problem, InferenceError):
            print_line(f"  WARNING    {replica.address}: {problem}")


_SECTIONS = ("model.", "vllm.", "seed=")
_OF_UPDATES = ("sleep", "sync_dir", "largest_gap")
"""Settings of a vLLM server whose weights a trainer updates."""


@with_options
def serve(
    model: Annotated[str, typer.Argument(help="Model folder or hub id; or a run folder, for its newest checkpoint.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings, such as model.dtype=bfloat16, model.engine=vllm or vllm.port=8000.", metavar="KEY=VALUE"
        ),
    ] = None,
    *,
    gateway: Annotated[GatewayConfig, "host", "port", "api_key"],
    checkpoint: CheckpointOfRun = None,
    store: Store = DEFAULT_STORE,
    max_concurrent: Annotated[
        int, typer.Option(help="Number of answers sampled at the same time; further calls wait.", min=1)
    ] = 64,
) -> None:
    """Serve a model over all routes of the gateway, and store its calls: chat completions, responses, messages.

    The model runs in this process, or with model.engine=vllm in a vLLM server that is started for it.
    """
    from rllm.cli.inputs import embedded, folder_of
    from rllm.gateway.app import create_app
    from rllm.gateway.server import bind, url_of
    from rllm.gateway.server import serve as serve_forever
    from rllm.sdk.variables import hide_operators_keys
    from rllm.store import open_store

    hide_operators_keys()
    config = _config(folder_of(model, checkpoint), settings or [])
    print_line(f"rllm serve: {loading(config.model.path)}; traces are kept in {store}")
    from rllm.inference.local.loading import check_source  # which imports torch
    from rllm.parser.tool_prompt import TemplateChoice

    check_source(config.model.path, template=TemplateChoice.of(config.model))
    with (
        closing(bind(gateway.host, gateway.port)) as listener,
        closing(open_store(store)) as traces,
        embedded(config, max_concurrent).upstream if config.model.engine == "embedded" else _vllm(config) as upstream,
    ):
        print_line(
            f'rllm serve: {config.model.path} as "policy" on {url_of(listener, gateway.host)}/v1\n'
            "  Ctrl-C stops it after calls in flight."
        )
        serve_forever(create_app(traces, upstream, gateway), listener, gateway)
    print_line("rllm serve: stopped")


def _config(path: str, settings: list[str]) -> TrainConfig:
    from rllm.cli.inputs import settings_to_serve
    from rllm.config.schema import refuse_changes

    config = settings_to_serve("serve", [f"model.path={path}", *settings], _SECTIONS)
    if config.vllm.url is not None:
        raise ConfigError(
            f"vllm.url={config.vllm.url!r} runs already: put a gateway in front of it with `rllm gateway --upstream`"
        )
    given = [pair.partition("=")[0].removeprefix("vllm.") for pair in settings if pair.startswith("vllm.")]
    if config.model.engine != "vllm":
        refuse_changes(config.vllm, "vllm", given, "without a server; also set model.engine=vllm")
    else:
        of_updates = [name for name in given if name in _OF_UPDATES]
        refuse_changes(config.vllm, "vllm", of_updates, "because nothing is trained here; leave it out")
    return config


@contextmanager
def _vllm(config: TrainConfig) -> Iterator[Upstream]:
    from rllm.backends.sampler import engine_on
    from rllm.backends.server_launch import (
        LOG_FILE,
        SERVED_NAME,
        refuse_adapter,
        serve_options,
        started_format,
        with_template_file,
    )
    from rllm.gateway.upstream.policy_server import upstream_of
    from rllm.inference.local.loading import tokenizer_of
    from rllm.inference.servers.command import vllm_command
    from rllm.inference.servers.vllm_server import VLLMServer, free_port

    refuse_adapter(config.model.path)
    config.vllm.sleep = "never"  # no training runs alongside it
    tokenizer = tokenizer_of(config.model).tokenizer
    tool_format = started_format(config, tokenizer)
    options = serve_options(config, port=config.vllm.port or free_port(), tool_format=tool_format)
    print_line(f"starting vLLM; its log is {LOG_FILE}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rllm-serve-")))
        server = VLLMServer.start(
            with_template_file(options, config, tokenizer, folder),
            command=vllm_command(config.vllm.command),
            log=Path(LOG_FILE),
            start_timeout_s=config.vllm.start_timeout_s,
            max_restarts=config.vllm.max_restarts,
        )
        stack.callback(server.close)
        server.watch(lambda: None)  # a restarted server reads the same weights
        yield upstream_of(engine_on(server, tokenizer, SERVED_NAME, tool_format), SERVED_NAME)


def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders of runs or evaluations, folders of such, or trace stores.",
            metavar="RUN",
            show_default="the folder runs",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; a token is required unless it is a loopback address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 7070,
    token: Annotated[
        str | None,
        optional("Token that callers must present; generated if one is required.", envvar="RLLM_VIEW_TOKEN"),
    ] = None,
    export: Annotated[Path | None, optional("Write the run's report to this HTML file instead.")] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs and evaluations as a local web page: rewards, rollouts, tokens, batches of the optimizer, and timings.

    A live run is updated as it goes. Nothing is written, and no other host is contacted.
    """
    import gc

    from rllm.gateway.config import is_loopback
    from rllm.gateway.server import bind, url_of
    from rllm.gateway.server import serve as serve_forever
    from rllm.viewer.app import create_app
    from rllm.viewer.export import export_report
    from rllm.viewer.render import url as path_of
    from rllm.viewer.runs import HOW_TO_MAKE_ONE, Runs

    # Data read from a store stays in memory; with the default of 700 new objects, the garbage collector takes a third
    # of the time of listing 100,000 rollouts.
    gc.set_threshold(50_000)
    sources = runs or ["runs"]
    if export is not None:
        if len(sources) != 1:
            raise ConfigError(f"--export takes one run, and {len(sources)} were named")
        count = export_report(sources[0], export)
        print(f"{export}: {export.stat().st_size / 1e6:.1f} MB, {counted(count, 'rollout')} in full")
        return
    shown = Runs(sources)
    found = shown.all()
    if len(found) == 1:
        _ = found[0].rows() or found[0].store  # errors are raised now, not on a page
    if not token:  # an empty one, as of an unset variable, would admit everyone
        token = None if is_loopback(host) else secrets.token_urlsafe(16)
    app = create_app(shown, token=token)
    listener = bind(host, port, prefix="--")
    path = path_of("run", found[0].name) if len(found) == 1 else "/"
    query = f"?{urlencode({'token': token})}" if token else ""
    address = f"{url_of(listener, host)}{path}{query}"
    print_line(f"{counted(len(found), 'run')}: {address}  (Ctrl-C ends)")
    if not found:
        print_line(f"There are no runs yet in {', '.join(sources)}: {HOW_TO_MAKE_ONE}")
    if browser:
        webbrowser.open(address)
    serve_forever(app, listener, GatewayConfig(shutdown_timeout_s=1.0))
