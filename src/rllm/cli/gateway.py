"""`rllm gateway`: capture the calls of any agent in front of any OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rllm.gateway.upstream import HTTPUpstream


def gateway(
    upstream: Annotated[
        str,
        typer.Option(help="Base URL of the OpenAI-compatible server to forward to.", metavar="URL", show_default=False),
    ],
    store: Annotated[str, typer.Option(help="Where traces are kept.", metavar="URL")] = "sqlite:///traces.db",
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but a loopback one needs --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must present.", envvar="RLLM_GATEWAY_API_KEY", show_default=False),
    ] = None,
    upstream_api_key: Annotated[
        str | None,
        typer.Option(help="Key for the upstream.", envvar="RLLM_UPSTREAM_API_KEY", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask the upstream for, whatever agents name.", show_default=False)
    ] = None,
    upstream_kind: Annotated[
        Literal["vllm", "openai"],
        typer.Option(
            help="vllm: returns token ids, takes extra fields (also SGLang, rllm). openai: rejects unknown fields."
        ),
    ] = "vllm",
    keep_days: Annotated[
        float | None, typer.Option(help="Delete sessions this long after their last call.", show_default=False)
    ] = None,
    max_gb: Annotated[
        float | None, typer.Option(help="Delete the oldest sessions above this size.", show_default=False)
    ] = None,
) -> None:
    """Capture every call of any agent, exactly, in front of any OpenAI-compatible server."""
    from rllm.gateway.app import create_app
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import bind, serve, url_of
    from rllm.gateway.upstream import HTTPUpstream
    from rllm.store import open_store
    from rllm.store.retention import Retention, pruning

    config = GatewayConfig(host=host, port=port, api_key=api_key)
    retention = Retention(keep_days=keep_days, max_gb=max_gb)
    server = HTTPUpstream(upstream, api_key=upstream_api_key, model=model, kind=upstream_kind)
    listener = bind(host, port)
    try:
        traces = open_store(store)
    except BaseException:
        listener.close()
        raise
    try:
        _greet(url_of(listener, host), server, store, needs_key=api_key is not None)
        with pruning(traces, retention):
            serve(create_app(traces, server, config), listener, shutdown_timeout_s=config.shutdown_timeout_s)
    finally:
        traces.close()
    print("rllm gateway: stopped; every acknowledged call is in the store")


def _greet(url: str, upstream: HTTPUpstream, store: str, *, needs_key: bool) -> None:
    """Say what to do next, in one block."""
    key = "KEY" if needs_key else "anything"
    print(
        f"rllm gateway listens on {url}\n"
        f"  agents     base_url={url}/sessions/SESSION/v1  api_key={key}\n"
        f"             (any SESSION you like, one for each rollout; {url}/v1 gives every call its own)\n"
        f"  traces     {url}/sessions/SESSION/traces, kept in {store}\n"
        f"  forwards   to {upstream.base_url}\n"
        f"  Ctrl-C ends it; calls in flight are finished first.",
        flush=True,
    )
    if problem := _problem_of(upstream):
        print(
            f"  WARNING    {problem}\n             (calls will fail, and /readyz says so, until it answers)", flush=True
        )


def _problem_of(upstream: HTTPUpstream) -> str | None:
    """Why the upstream cannot be used now, if it cannot."""
    import asyncio

    from rllm.errors import InferenceError

    async def check() -> None:
        try:
            await asyncio.wait_for(upstream.check(), timeout=5.0)
        finally:
            await upstream.close()  # The server opens its own connections, in its own event loop.

    try:
        asyncio.run(check())
    except TimeoutError:
        return f"the upstream {upstream.base_url} did not answer within 5 s"
    except InferenceError as error:
        return str(error)
    return None
