"""Server of a run with `model.engine=vllm`: check its settings, then start or join it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from rllm.backends.lora import Adapter
from rllm.backends.sampler import ServerSampler
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.errors import ConfigError
from rllm.inference.local.loading import (
    MERGE_IT,
    LoadedModel,
    choose_device,
    choose_dtype,
    is_adapter,
    load_tokenizer,
    save_model,
    save_tokenizer,
)
from rllm.inference.local.quantized import dequantized_weights
from rllm.inference.servers.capabilities import check_trainable
from rllm.inference.servers.command import ServeOptions, vllm_command
from rllm.inference.servers.control import choose_handover
from rllm.inference.servers.vllm_server import VLLMServer, free_port
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_parser import DEFAULT_FORMAT, chosen_format
from rllm.parser.tool_prompt import TemplateChoice
from rllm.sdk.variables import key_of_user

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SERVED_NAME = "policy"
LOG_FILE = "vllm.log"
_SHARED_MEMORY = Path("/dev/shm")
_COPIES = 3
"""Sets of weights to have room for: the last ones, the new ones, and one to spare."""
_MEMORY_ON_SHARED_GPU = 0.4
"""Fraction of a shared GPU for the server; the trainer's weights, gradients and optimizer state stay when it wakes."""
_LAUNCH_SETTINGS = ("command", "port", "devices", "dtype", "gpu_memory", "reasoning_parser", "args")


def check_serving(config: TrainConfig) -> None:
    """Raise `ConfigError` if a setting of the server has no effect or cannot be used, or vLLM is not installed."""
    vllm = config.vllm
    if config.model.engine != "vllm":
        refuse_changes(vllm, "vllm", type(vllm).model_fields, "without a server; set model.engine=vllm, too")
        return
    if vllm.url is not None:
        refuse_changes(vllm, "vllm", _LAUNCH_SETTINGS, "on a server that runs already; leave out vllm.url, or this")
        why = (
            f"on the server of vllm.url={vllm.url!r}, which renders first turns by its own template: start it with "
            "--chat-template FILE, and put that file into the folder of model.path as chat_template.jinja"
        )
        refuse_changes(config.model, "model", ("chat_template", "tool_prompt"), why)
        why = f"on the server of vllm.url={vllm.url!r}, which has all bits of the weights; leave out one of the two"
        refuse_changes(config.model, "model", ("quantize",), why)
    else:
        refuse_adapter(config.model.path)
        vllm_command(vllm.command)
        serve_options(config, port=0)
    if _sleeps(config) and config.rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness}: the server and the trainer share a GPU and take "
            "turns, so rollouts cannot continue during updates: give the server its own GPUs (vllm.devices=1), or "
            "use rollout.max_staleness=0"
        )


def refuse_adapter(path: str) -> None:
    """Check that a folder holds no adapter, which a server would ignore; raise `ConfigError` if it does."""
    if is_adapter(path):
        raise ConfigError(f"model.path={path!r} is a LoRA adapter, which vLLM does not serve alone: {MERGE_IT}")


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """Server that takes calls, with the settings that a sampler on it needs."""

    config: TrainConfig
    server: VLLMServer
    scratch: Path
    tool_format: str | None
    """Format of tool calls that it parses; of a joined server only if the user set it."""

    def sampler(self, loaded: LoadedModel, adapter: Adapter | None) -> ServerSampler:
        """Return the sampler of a policy on this server; raise `ConfigError` if the server takes no new weights."""
        model, vllm = self.config.model, self.config.vllm
        return ServerSampler(
            self.server,
            choose_handover(self.server.control, lora=adapter is not None),
            loaded.model,
            loaded.tokenizer,
            adapter=adapter,
            served_name=SERVED_NAME if vllm.url is None or adapter is not None else self.server.control.models()[0],
            tool_format=self.tool_format,
            scratch=self.scratch,
            sleeps=_sleeps(self.config),
            max_length=model.max_length,
            largest_gap=vllm.largest_gap,
        )

    def close(self) -> None:
        """Stop the server, if it was started here."""
        self.server.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def open_server(config: TrainConfig, *, base: LoadedModel | None = None) -> RunningServer:
    """Start the server of a run, or join it.

    Args:
        config: settings of the run.
        base: quantized model whose dequantized weights the server gets, in place of the weights in `model.path`.

    Raises:
        ConfigError: if there is none to join, it is not fit for training, or the port is in use.
        InferenceError: if it does not start.
        MissingDependencyError: if vLLM is not installed.
    """
    vllm = config.vllm
    run_dir = config.run_dir or Path("runs")
    limits = {"start_timeout_s": vllm.start_timeout_s, "max_restarts": vllm.max_restarts}
    tool_format = config.model.tool_parser
    with ExitStack() as undo:
        if vllm.url is not None:
            key = key_of_user()
            check_trainable(vllm.url, api_key=key, temperature=config.rollout.temperature)
            server = VLLMServer.join(vllm.url, api_key=key, **limits)
            scratch = _scratch(config, run_dir)
            undo.callback(shutil.rmtree, scratch, ignore_errors=True)
        else:
            command = vllm_command(vllm.command)
            scratch = _scratch(config, run_dir)
            undo.callback(shutil.rmtree, scratch, ignore_errors=True)
            tokenizer = load_tokenizer(config.model.path, template=TemplateChoice.of(config.model)).tokenizer
            tool_format = started_format(config, tokenizer)
            options = serve_options(config, port=vllm.port or free_port(), tool_format=tool_format)
            if base is not None:
                options = replace(options, model=str(_dequantized(base, scratch / "base")))
            server = VLLMServer.start(
                with_template_file(options, config, tokenizer, scratch),
                command=command,
                log=run_dir / LOG_FILE,
                scratch=scratch,
                **limits,
            )
        undo.callback(server.close)
        if _sleeps(config):
            server.control.sleep()  # the trainer loads its model next
        undo.pop_all()
    return RunningServer(config=config, server=server, scratch=scratch, tool_format=tool_format)


def _dequantized(base: LoadedModel, folder: Path) -> Path:
    """Write a quantized model's weights as they are computed with, so that the server has the trainer's numbers."""
    try:
        save_model(base.model, folder, state_dict=dequantized_weights(base.model))
        save_tokenizer(base.tokenizer, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.quantize: the dequantized weights, which the server reads, cannot be written to {str(folder)!r} "
            f"({error}): make room for them, or choose another folder with vllm.sync_dir"
        ) from error
    return folder


def serve_options(config: TrainConfig, *, port: int, tool_format: str = DEFAULT_FORMAT) -> ServeOptions:
    """Return the options that a run's server is started with; `tool_format` comes from `started_format`."""
    model, vllm = config.model, config.vllm
    device = choose_device(model.device)
    dtype = str(choose_dtype(model.dtype, device)).removeprefix("torch.") if vllm.dtype == "auto" else vllm.dtype
    return ServeOptions(
        model=str(Path(model.path).expanduser()) if Path(model.path).expanduser().is_dir() else model.path,
        port=port,
        served_name=SERVED_NAME,
        dtype=dtype,
        max_length=model.max_length,
        tool_parser=tool_format,
        reasoning_parser=vllm.reasoning_parser,
        lora_rank=model.lora_rank,
        gpu_memory=vllm.gpu_memory or (_MEMORY_ON_SHARED_GPU if _sleeps(config) else None),
        sleeps=_sleeps(config),
        devices=vllm.devices,
        on_cpu=device.type != "cuda" and vllm.devices is None,
        extra_args=tuple(vllm.args),
    )


def with_template_file(
    options: ServeOptions, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> ServeOptions:
    """Return the options with the chosen chat template, if any, written to a file in this folder."""
    if not TemplateChoice.of(config.model):
        return options
    file = folder / "chat_template.jinja"
    file.write_text(ChatTemplate(tokenizer).text, encoding="utf-8")
    return replace(options, chat_template=str(file))


def started_format(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the format of tool calls that a server started here parses."""
    return chosen_format(config.model.tool_parser, ChatTemplate(tokenizer).text)


def _sleeps(config: TrainConfig) -> bool:
    if config.vllm.sleep != "auto":
        return bool(config.vllm.sleep == "always")
    shares_gpu = config.vllm.devices is None and config.vllm.url is None
    return shares_gpu and choose_device(config.model.device).type == "cuda"


def _scratch(config: TrainConfig, run_dir: Path) -> Path:
    if config.vllm.sync_dir is not None:
        parent = config.vllm.sync_dir.expanduser().absolute()
    else:
        in_memory = config.vllm.url is None and _has_room(_SHARED_MEMORY, config.model.path)
        parent = _SHARED_MEMORY if in_memory else run_dir.absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="rllm-weights-", dir=parent))
    except OSError as error:
        raise ConfigError(f"vllm.sync_dir={str(parent)!r} cannot be written to: {error.strerror}") from error


def _has_room(folder: Path, model: str) -> bool:
    """Return whether the model's size is known and some sets of its weights fit into the folder."""
    weights = list(Path(model).expanduser().glob("*.safetensors"))
    size = sum(file.stat().st_size for file in weights)
    return bool(weights) and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _COPIES * size
