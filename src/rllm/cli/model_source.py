"""Models to sample from: in this process, or on a server."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rllm.errors import ConfigError, InferenceError
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream, Upstream, UpstreamKind
from rllm.gateway.upstream.token_prompts import TokenPrompts

if TYPE_CHECKING:
    from rllm.trainer.config import TrainConfig

_CHECK_TIMEOUT_S = 10.0
_OF_TRAINING = ("lora_rank", "lora_alpha", "lora_targets", "gradient_checkpointing", "reference_offload")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that exists, but is not loaded yet."""

    name: str
    identity: dict[str, str]
    """Facts that identify the model."""
    upstream: AbstractContextManager[Upstream]
    """Context that loads the model; entered only if it is needed."""


def embedded(config: TrainConfig, max_concurrent: int) -> ModelSource:
    """Return the model of `config.model`, to run in this process.

    Raises:
        ConfigError: if its path is not a model.
    """
    from rllm.inference.local.loading import check_source

    check_source(config.model.path)
    return ModelSource(
        name=config.model.path, identity=_identity(config), upstream=_embedded_upstream(config, max_concurrent)
    )


def folder_of(model: str, checkpoint: str | None) -> str:
    """Return the folder of a run's checkpoint, the newest unless one is named; any other path or hub id as it is.

    Raises:
        ConfigError: if the run does not have the checkpoint, or a checkpoint is given for a path that is not a run.
    """
    run = Path(model).expanduser()
    if (run / "checkpoints").is_dir():
        from rllm.trainer.export import chosen_checkpoint

        return str(chosen_checkpoint(run, checkpoint or "latest"))
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {model!r} is not the folder of a run; leave --checkpoint out")
    return model


def given_of_training(pairs: Iterable[str]) -> list[str]:
    """Return the settings of `model` among these that matter only for training."""
    given = {pair.partition("=")[0] for pair in pairs}
    return [name for name in _OF_TRAINING if f"model.{name}" in given]


def refuse_options_of_server(
    kind: UpstreamKind, tokenizer: str | None = None, chat_template: Path | None = None
) -> None:
    """Refuse options of a server if no server is given.

    Raises:
        ConfigError: naming the option.
    """
    given = {
        "--upstream-kind": None if kind == "vllm" else kind,
        "--tokenizer": tokenizer,
        "--chat-template": chat_template,
    }
    if unused := next((f"{option} {value}" for option, value in given.items() if value is not None), None):
        raise ConfigError(f"{unused} would have no effect without --base-url: name the server, or leave it out")


def key_of_server() -> str | None:
    """Return the key of a model's server from the environment."""
    from rllm.sdk.variables import operators_keys

    return operators_keys().get("RLLM_UPSTREAM_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def token_prompts(tokenizer: str | None, chat_template: Path | None) -> TokenPrompts | None:
    """Load `--tokenizer` and `--chat-template` for a server.

    Raises:
        ConfigError: if one cannot be loaded, or if the template has no tokenizer.
    """
    if tokenizer is not None:
        return TokenPrompts.load(tokenizer, chat_template)
    if chat_template is not None:
        raise ConfigError(f"--chat-template {chat_template} would have no effect without --tokenizer: give both")
    return None


def served(
    base_url: str,
    model: str | None,
    api_key: str | None,
    kind: UpstreamKind,
    *,
    tokenizer: str | None = None,
    chat_template: Path | None = None,
) -> ModelSource:
    """Return the named model of a server, or its only one. The server must answer now.

    With its `tokenizer`, later turns continue from exactly the sampled tokens.

    Raises:
        ConfigError: if the URL is invalid, or the server has several models.
        InferenceError: if the server does not answer.
    """
    found = asyncio.run(_models(HTTPUpstream(base_url, api_key=api_key, read_timeout_s=_CHECK_TIMEOUT_S), model))
    if model is None and len(found) != 1:
        raise ConfigError(
            f"--model is missing: the server at {base_url} lists {', '.join(found) or 'none'}; choose one"
        )
    name = model or found[0]
    tokens = token_prompts(tokenizer, chat_template)
    upstream = HTTPUpstream(base_url, api_key=api_key, model=name, kind=kind, tokens=tokens)
    return ModelSource(name=name, identity={"model": name}, upstream=nullcontext(upstream))


async def _models(server: HTTPUpstream, wanted: str | None) -> list[str]:
    try:
        return [str(item.get("id")) for item in await server.models()]
    except InferenceError as error:
        if wanted is not None and error.status_code in (404, 405):  # the server answers, but does not list its models
            return []
        raise
    finally:
        await server.close()


@contextmanager
def _embedded_upstream(config: TrainConfig, max_concurrent: int) -> Iterator[Upstream]:
    from rllm.cli.training import quiet_libraries
    from rllm.inference.local import LocalEngine, load_model
    from rllm.parser.tool_prompt import TemplateChoice

    quiet_libraries()
    settings = config.model
    template = TemplateChoice.of(settings)
    loaded = load_model(settings.path, dtype=settings.dtype, device=settings.device, template=template)
    engine = LocalEngine(
        loaded.model,
        loaded.tokenizer,
        max_concurrent=max_concurrent,
        max_length=settings.max_length,
        tool_parser=settings.tool_parser,
        seed=config.seed,
        device=loaded.device,
    )
    with closing(engine):
        yield EngineUpstream(engine, "policy")


def _identity(config: TrainConfig) -> dict[str, str]:
    """Return facts that identify a model.

    Its files, since a folder may get others, and settings that change answers.
    """
    settings = config.model.model_dump(exclude_defaults=True, exclude={"path", "device"})
    settings |= config.gateway.model_dump(exclude_defaults=True, include={"exact_turns"})
    settings |= config.model_dump(exclude_defaults=True, include={"seed"})
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        return {"model": config.model.path, "model settings": str(settings)}
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return {"model": f"{folder.resolve()} (files {digest.hexdigest()[:16]})", "model settings": str(settings)}
