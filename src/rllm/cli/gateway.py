"""`rllm gateway`: capture the calls of any agent in front of any OpenAI-compatible server."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rllm.cli.options import (
    DEFAULT_STORE,
    ChatTemplateFile,
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
from rllm.cli.terminal import say

if TYPE_CHECKING:
    from rllm.gateway.upstream import UpstreamPool


def gateway(
    upstream: Annotated[
        list[str],
        typer.Option(
            help="Base URL of the OpenAI-compatible server to forward to; again for every further replica of it.",
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
            help="Key for changing the upstreams over HTTP; else --api-key.",
            envvar="RLLM_GATEWAY_ADMIN_KEY",
            show_default=False,
        ),
    ] = None,
    upstream_api_key: Annotated[
        str | None,
        typer.Option(help="Key for the upstream.", envvar="RLLM_UPSTREAM_API_KEY", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask the upstream for, whatever agents name.", show_default=False)
    ] = None,
    upstream_kind: ServerKind = "vllm",
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplateFile = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Calls under way at one replica; more wait in the gateway.", min=1)
    ] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Calls that may wait; more are refused with 503.", min=0)] = 10_000,
    hold_s: Annotated[
        float,
        typer.Option(help="Seconds that a call waits while no replica answers, before it fails.", callback=above_zero),
    ] = 60.0,
    silence_s: Annotated[
        float,
        typer.Option(help="Seconds after which a replica that says nothing is given up.", callback=above_zero),
    ] = 600.0,
    total_s: Annotated[
        float,
        typer.Option(help="Seconds that a call may take, waiting and retries included.", callback=above_zero),
    ] = 3600.0,
    keep_days: KeepDays = None,
    max_gb: MaxGb = None,
    session_memory_gb: Annotated[
        float, typer.Option(help="Memory for the sessions that went on last; others are read anew when they go on.")
    ] = 0.5,
    redact: Annotated[
        str | None,
        typer.Option(
            help="Function of a Trace that gives it back with the texts that may be stored.",
            metavar="PKG.MOD:FUNCTION",
            show_default=False,
        ),
    ] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="Export OpenTelemetry spans of calls to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
    otel_response_ids: Annotated[
        bool, typer.Option("--otel-response-ids", help="Put the sampled ids into these spans, beside their number.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="json: one object a line on stderr, with a line for each call: ids and times, no content."),
    ] = "text",
) -> None:
    """Capture every call of any agent, exactly, in front of any OpenAI-compatible server."""
    from rllm.cli.model_source import token_prompts
    from rllm.gateway.app import create_app
    from rllm.gateway.call_hooks import log_as_json
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.redaction import load_redact
    from rllm.gateway.server import bind, serve, url_of
    from rllm.gateway.upstream import HTTPUpstream, PoolConfig, UpstreamPool
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
    say("rllm gateway: stopped; every acknowledged call is in the store")


def _greet(url: str, pool: UpstreamPool, store: str, *, needs_key: bool) -> None:
    """Say what to do next, in one block."""
    key = "KEY" if needs_key else "anything"
    say(
        f"rllm gateway listens on {url}\n"
        f"  agents     base_url={url}/sessions/SESSION/v1  api_key={key}\n"
        f"             (any SESSION you like, one for each rollout; {url}/v1 gives every call its own)\n"
        f"  traces     {url}/sessions/SESSION/traces, kept in {store}\n"
        f"  forwards   to {', '.join(replica.address for replica in pool.replicas)}\n"
        f"  Ctrl-C ends it; calls in flight are finished first."
    )
    for problem in _problems_of(pool):
        say(f"  WARNING    {problem}")


def _problems_of(pool: UpstreamPool) -> list[str]:
    """What is wrong with replicas that calls go to all the same; those that are down are told of by the log."""
    import asyncio

    from rllm.errors import InferenceError

    async def check() -> list[str | BaseException | None]:
        try:
            return await asyncio.gather(*(replica.check() for replica in pool.replicas), return_exceptions=True)
        finally:
            await pool.close()  # The server opens its own connections, in its own event loop.

    found = zip(pool.replicas, asyncio.run(check()), strict=True)
    return [
        f"{replica.address} says: {problem}"
        for replica, problem in found
        if replica.up and isinstance(problem, InferenceError)
    ]
