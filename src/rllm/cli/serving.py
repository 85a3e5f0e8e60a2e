"""`rllm gateway` and `rllm serve`: capture calls in front of a server, or serve a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rllm.cli.options import (
    DEFAULT_STORE,
    ChatTemplateFile,
    CheckpointOfRun,
    GatewayKey,
    Host,
    KeepDays,
    MaxGb,
    Port,
    ServerKind,
    Store,
    Tokenizer,
    above_zero,
)
from rllm.cli.terminal import loading, print_line

if TYPE_CHECKING:
    from rllm.gateway.upstream import Upstream, UpstreamPool
    from rllm.trainer.config import TrainConfig


def gateway(
    upstream: Annotated[
        list[str],
        typer.Option(
            help="Base URL of the OpenAI-compatible server to forward to; repeat it for each replica.",
            metavar="URL",
            show_default=False,
        ),
    ],
    store: Store = DEFAULT_STORE,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: GatewayKey = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="Key for changing the upstreams over HTTP; --api-key by default.",
            envvar="RLLM_GATEWAY_ADMIN_KEY",
            show_default=False,
        ),
    ] = None,
    upstream_api_key: Annotated[
        str | None,
        typer.Option(help="Key for the upstream.", envvar="RLLM_UPSTREAM_API_KEY", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to request from the upstream, instead of the one that agents name.", show_default=False
        ),
    ] = None,
    upstream_kind: ServerKind = "vllm",
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplateFile = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Calls in flight at one replica; more wait in the gateway.", min=1)
    ] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Calls that may wait; more get status 503.", min=0)] = 10_000,
    hold_s: Annotated[
        float,
        typer.Option(help="Seconds that a call waits for a replica while none answers.", callback=above_zero),
    ] = 60.0,
    silence_s: Annotated[
        float,
        typer.Option(help="Seconds of silence after which a call to a replica fails.", callback=above_zero),
    ] = 600.0,
    total_s: Annotated[
        float,
        typer.Option(help="Seconds for a call, waiting and retries included.", callback=above_zero),
    ] = 3600.0,
    keep_days: KeepDays = None,
    max_gb: MaxGb = None,
    session_memory_gb: Annotated[
        float, typer.Option(help="Memory for recently used sessions; others are read from the store again.")
    ] = 0.5,
    redact: Annotated[
        str | None,
        typer.Option(
            help="Function that takes a Trace and returns it with the texts that may be stored.",
            metavar="PKG.MOD:FUNCTION",
            show_default=False,
        ),
    ] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="Export OpenTelemetry spans of calls to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
    otel_response_ids: Annotated[
        bool, typer.Option("--otel-response-ids", help="Include the sampled ids in these spans.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="json: one object per line on stderr, with one for each call: ids and times, no content."),
    ] = "text",
) -> None:
    """Capture every call of any agent exactly, in front of any OpenAI-compatible server."""
    from rllm.cli.model_source import token_prompts
    from rllm.gateway.app import create_app
    from rllm.gateway.call_hooks import log_as_json
    from rllm.gateway.config import GatewayConfig, PoolConfig
    from rllm.gateway.redaction import load_redact
    from rllm.gateway.server import bind, serve, url_of
    from rllm.gateway.upstream import HTTPUpstream, UpstreamPool
    from rllm.store import open_store
    from rllm.store.maintenance import Retention, pruning

    config = GatewayConfig(
        host=host,
        port=port,
        api_key=api_key,
        admin_key=admin_key,
        session_memory_gb=session_memory_gb,
        redact=None if redact is None else load_redact(redact),
        log_calls=log_format == "json",
        otel=otel or otel_response_ids,
        otel_response_ids=otel_response_ids,
    )
    if config.log_calls:
        log_as_json()
    retention = Retention(keep_days=keep_days, max_gb=max_gb)
    tokens = token_prompts(tokenizer, chat_template)
    connect = partial(
        HTTPUpstream,
        api_key=upstream_api_key,
        model=model,
        kind=upstream_kind,
        tokens=tokens,
        read_timeout_s=silence_s,
    )
    limits = PoolConfig(
        max_in_flight=max_in_flight, max_waiting=max_waiting, hold_timeout_s=hold_s, total_timeout_s=total_s
    )
    pool = UpstreamPool(upstream, connect, limits)
    with closing(bind(host, port)) as listener, closing(open_store(store)) as traces:
        app = create_app(traces, pool, config)
        _greet(url_of(listener, host), pool, store, needs_key=api_key is not None)
        with pruning(traces, retention):
            serve(app, listener, config)
    print_line("rllm gateway: stopped; every acknowledged call is in the store")


def _greet(url: str, pool: UpstreamPool, store: str, *, needs_key: bool) -> None:
    """Print addresses and next steps."""
    key = "KEY" if needs_key else "anything"
    print_line(
        f"rllm gateway listens on {url}\n"
        f"  agents     base_url={url}/sessions/SESSION/v1  api_key={key}\n"
        f"             (choose a SESSION for each rollout; {url}/v1 gives each call its own)\n"
        f"  traces     {url}/sessions/SESSION/traces, kept in {store}\n"
        f"  forwards   to {', '.join(replica.address for replica in pool.replicas)}\n"
        f"  Ctrl-C stops it after calls in flight."
    )
    for problem in _problems_of(pool):
        print_line(f"  WARNING    {problem}")


def _problems_of(pool: UpstreamPool) -> list[str]:
    """Return problems of replicas that get calls nevertheless; replicas that are down are logged."""
    import asyncio

    from rllm.errors import InferenceError

    async def check() -> list[str | BaseException | None]:
        try:
            return await asyncio.gather(*(replica.check() for replica in pool.replicas), return_exceptions=True)
        finally:
            await pool.close()  # The server opens its own connections, in its own event loop.

    found = zip(pool.replicas, asyncio.run(check()), strict=True)
    return [
        f"{replica.address}: {problem}"
        for replica, problem in found
        if replica.up and isinstance(problem, InferenceError)
    ]


_SECTIONS = ("model.", "vllm.", "seed=")
_OF_UPDATES = ("sleep", "sync_dir", "largest_gap")
"""Settings of a vLLM server whose weights a trainer updates."""


def serve(
    model: Annotated[str, typer.Argument(help="Model folder or hub id; or a run folder, for its newest checkpoint.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings, such as model.dtype=bfloat16, model.engine=vllm or vllm.port=8000.", metavar="KEY=VALUE"
        ),
    ] = None,
    checkpoint: CheckpointOfRun = None,
    store: Store = DEFAULT_STORE,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: GatewayKey = None,
    max_concurrent: Annotated[int, typer.Option(help="Answers sampled at a time; more wait.", min=1)] = 64,
) -> None:
    """Serve a model over all routes of the gateway, and store its calls: chat completions, responses, messages.

    The model runs in this process, or with model.engine=vllm in a vLLM server that is started for it.
    """
    from rllm.cli.model_source import folder_of
    from rllm.gateway.app import create_app
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import bind, url_of
    from rllm.gateway.server import serve as serve_forever
    from rllm.sdk.variables import hide_operators_keys
    from rllm.store import open_store

    hide_operators_keys()
    gateway = GatewayConfig(host=host, port=port, api_key=api_key)
    config = _config(folder_of(model, checkpoint), settings or [])
    print_line(f"rllm serve: {loading(config.model.path)}; traces are kept in {store}")
    from rllm.inference.local.loading import check_source  # which imports torch

    check_source(config.model.path)
    with (
        closing(bind(host, port)) as listener,
        closing(open_store(store)) as traces,
        _upstream(config, max_concurrent) as upstream,
    ):
        print_line(
            f'rllm serve: {config.model.path} as "policy" on {url_of(listener, host)}/v1\n'
            "  Ctrl-C stops it after calls in flight."
        )
        serve_forever(create_app(traces, upstream, gateway), listener, gateway)
    print_line("rllm serve: stopped")


def _config(path: str, settings: list[str]) -> TrainConfig:
    from rllm.cli.model_source import given_of_training
    from rllm.config.schema import refuse_changes
    from rllm.errors import ConfigError
    from rllm.trainer.config import load_config

    for pair in settings:
        if "=" in pair and not pair.startswith(_SECTIONS):
            raise ConfigError(f"{pair}: it has no effect here; rllm serve takes model.NAME=, vllm.NAME= and seed=")
    config = load_config([f"model.path={path}", *settings])
    if config.vllm.url is not None:
        raise ConfigError(
            f"vllm.url={config.vllm.url!r} runs already: put a gateway in front of it with `rllm gateway --upstream`"
        )
    why = "because nothing is trained here; leave it out"
    refuse_changes(config.model, "model", given_of_training(settings), why)
    given = [pair.partition("=")[0].removeprefix("vllm.") for pair in settings if pair.startswith("vllm.")]
    if config.model.engine != "vllm":
        refuse_changes(config.vllm, "vllm", given, "without a server; also set model.engine=vllm")
    else:
        refuse_changes(config.vllm, "vllm", [name for name in given if name in _OF_UPDATES], why)
    return config


@contextmanager
def _upstream(config: TrainConfig, max_concurrent: int) -> Iterator[Upstream]:
    from rllm.cli.model_source import embedded

    opened = embedded(config, max_concurrent).upstream if config.model.engine == "embedded" else _vllm(config)
    with opened as upstream:
        yield upstream


@contextmanager
def _vllm(config: TrainConfig) -> Iterator[Upstream]:
    from rllm.backends.server_launch import (
        LOG_FILE,
        SERVED_NAME,
        refuse_adapter,
        serve_options,
        started_format,
        with_template_file,
    )
    from rllm.backends.server_sampler import engine_on
    from rllm.gateway.upstream.policy_server import upstream_of
    from rllm.inference.local.loading import load_tokenizer
    from rllm.inference.servers.command import vllm_command
    from rllm.inference.servers.vllm_server import VLLMServer, free_port
    from rllm.parser.tool_prompt import TemplateChoice

    refuse_adapter(config.model.path)
    config.vllm.sleep = "never"  # no training runs beside it
    tokenizer = load_tokenizer(config.model.path, template=TemplateChoice.of(config.model)).tokenizer
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
