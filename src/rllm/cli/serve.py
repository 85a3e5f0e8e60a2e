"""`rllm serve`: a model, or what a run has made of one, behind the gateway's routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import DEFAULT_STORE, CheckpointOfRun, GatewayKey, Host, Port, Store
from rllm.cli.terminal import loading, say

if TYPE_CHECKING:
    from rllm.gateway.upstream import Upstream
    from rllm.trainer.config import TrainConfig

_SECTIONS = ("model.", "vllm.", "seed=")
_OF_UPDATES = ("sleep", "sync_dir", "largest_gap")
"""Settings of a vLLM server that a trainer gives new weights."""


def serve(
    model: Annotated[
        str, typer.Argument(help="Model folder or hub id; or the folder of a run, for its newest checkpoint.")
    ],
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
    max_concurrent: Annotated[int, typer.Option(help="Answers made at a time; more wait.", min=1)] = 64,
) -> None:
    """Serve a model over every route of the gateway, and keep what is said: chat completions, responses, messages.

    It is sampled from in this process; with model.engine=vllm by a vLLM server that is started for it.
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
    say(f"rllm serve: {loading(config.model.path)}; traces are kept in {store}")
    from rllm.inference.local.loading import check_source  # which imports torch

    check_source(config.model.path)
    with (
        closing(bind(host, port)) as listener,
        closing(open_store(store)) as traces,
        _upstream(config, max_concurrent) as upstream,
    ):
        say(
            f'rllm serve: {config.model.path} as "policy" on {url_of(listener, host)}/v1\n'
            "  Ctrl-C ends it, and calls in flight are finished first."
        )
        serve_forever(create_app(traces, upstream, gateway), listener, gateway)
    say("rllm serve: stopped")


def _config(path: str, settings: list[str]) -> TrainConfig:
    from rllm.cli.model_source import given_of_training
    from rllm.config.schema import refuse_changes
    from rllm.errors import ConfigError
    from rllm.trainer.config import load_config

    for pair in settings:
        if "=" in pair and not pair.startswith(_SECTIONS):
            raise ConfigError(f"{pair}: it means nothing here; rllm serve takes model.NAME=, vllm.NAME= and seed=")
    config = load_config([f"model.path={path}", *settings])
    if config.vllm.url is not None:
        raise ConfigError(
            f"vllm.url={config.vllm.url!r} runs already: put a gateway before it, with `rllm gateway --upstream`"
        )
    why = "because nothing is trained here; leave it out"
    refuse_changes(config.model, "model", given_of_training(settings), why)
    given = [pair.partition("=")[0].removeprefix("vllm.") for pair in settings if pair.startswith("vllm.")]
    if config.model.engine != "vllm":
        refuse_changes(config.vllm, "vllm", given, "without a server; set model.engine=vllm, too")
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
    from rllm.gateway.upstream.served import upstream_of
    from rllm.inference.local.loading import load_tokenizer
    from rllm.inference.servers.command import vllm_command
    from rllm.inference.servers.vllm_server import VLLMServer, free_port
    from rllm.parser.tool_prompt import TemplateChoice

    refuse_adapter(config.model.path)
    config.vllm.sleep = "never"  # nobody trains beside it
    tokenizer = load_tokenizer(config.model.path, template=TemplateChoice.of(config.model)).tokenizer
    tool_format = started_format(config, tokenizer)
    options = serve_options(config, port=config.vllm.port or free_port(), tool_format=tool_format)
    say(f"starting vLLM; what it says is in {LOG_FILE}")
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
        server.watch(lambda: None)  # a new one reads the weights that are served
        yield upstream_of(engine_on(server, tokenizer, SERVED_NAME, tool_format), SERVED_NAME)
