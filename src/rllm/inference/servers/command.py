"""Command line and environment of a `vllm serve` whose answers can be trained on."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rllm.errors import ConfigError, MissingDependencyError

PLUGIN = Path(__file__).with_name("plugin")
"""Folder that vLLM's own processes import from."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
_MANAGED_FLAGS = {
    "--model": "use model.path",
    "--served-model-name": "remove it: the name follows from the run",
    "--host": "remove it: the server listens on this machine only",
    "--port": "use vllm.port",
    "--api-key": "use the environment variable VLLM_API_KEY, which a list of processes does not show",
    "--dtype": "use vllm.dtype",
    "--max-model-len": "use model.max_length",
    "--logprobs-mode": "remove it: training needs processed_logprobs",
    "--generation-config": "remove it: training needs the value vllm, which means no defaults of the model",
    "--tool-call-parser": "use model.tool_parser",
    "--chat-template": "use model.chat_template",
    "--reasoning-parser": "use vllm.reasoning_parser",
    "--gpu-memory-utilization": "use vllm.gpu_memory",
    "--device-memory-utilization": "use vllm.gpu_memory",
    "--enable-lora": "use model.lora_rank",
    "--max-lora-rank": "use model.lora_rank",
    "--enable-sleep-mode": "use vllm.sleep",
    "--worker-extension-cls": "remove it: training needs rllm's own",
    "--weight-transfer-config": "remove it: training needs rllm's own",
}
"""Flags that are set here, with the remedy for a user who gives one."""
_VLLM_NAMES = {"qwen": "hermes", "deepseek_r1": "deepseek_v3", "r1": "deepseek_v3", "harmony": "openai"}
"""vLLM's names of formats that have another name here."""
_DEFAULT_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes all cores but one for itself, and the trainer gets that one
    "VLLM_CPU_KVCACHE_SPACE": "4",  # gibibytes; else a share of all memory, which the trainer needs, too
    "VLLM_HOST_IP": "127.0.0.1",
}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Model to serve, and how."""

    model: str
    """Folder or hub id."""
    port: int
    served_name: str = "policy"
    dtype: str = "auto"
    max_length: int | None = None
    tool_parser: str = "hermes"
    chat_template: str | None = None
    reasoning_parser: str | None = None
    lora_rank: int = 0
    """Rank of the adapters that it will receive; 0 serves the model itself."""
    gpu_memory: float | None = None
    """Fraction of each GPU's memory to use; `None` leaves it to vLLM."""
    sleeps: bool = False
    """True if the server can release GPU memory while it is idle."""
    devices: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""
    on_cpu: bool = False
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for argument in self.extra_args:
            if (flag := _decided_flag(argument)) is not None:
                raise ConfigError(f"vllm.args={argument!r}: rllm sets {flag} itself; {_MANAGED_FLAGS[flag]}")


def _decided_flag(argument: str) -> str | None:
    """Return the managed flag that vLLM reads in an argument, if any.

    vLLM takes underscores for dashes, any prefix of a flag for the whole, `--no-` for the opposite, and the text
    after a dot for a member of the value.
    """
    flag = argument.partition("=")[0].partition(".")[0].replace("_", "-")
    for name in (flag, flag.replace("--no-", "--", 1)):
        found = next((managed for managed in _MANAGED_FLAGS if managed.startswith(name)), None)
        if found is not None and len(name) > len("--"):
            return found
    return None


def serve_arguments(options: ServeOptions) -> list[str]:
    """Return the arguments that follow `vllm`."""
    # Calls ask for the adapter by the policy's name, so the base model needs another one.
    base_name = f"{options.served_name}-base" if options.lora_rank else options.served_name
    given: dict[str, str | None] = {
        "--served-model-name": base_name,
        "--host": "127.0.0.1",
        "--port": str(options.port),
        "--dtype": options.dtype,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--enable-auto-tool-choice": None,
        "--tool-call-parser": _VLLM_NAMES.get(options.tool_parser, options.tool_parser),
        "--worker-extension-cls": "rllm_vllm.Extension",
        "--weight-transfer-config": json.dumps({"backend": "rllm_file"}),
    }
    if options.max_length is not None:
        given["--max-model-len"] = str(options.max_length)
    if options.chat_template is not None:
        given["--chat-template"] = options.chat_template
    if options.reasoning_parser is not None:
        given["--reasoning-parser"] = options.reasoning_parser
    if options.gpu_memory is not None and not options.on_cpu:
        given["--gpu-memory-utilization"] = str(options.gpu_memory)
    if options.sleeps:
        given["--enable-sleep-mode"] = None
    if options.on_cpu and not any("chunked-prefill" in argument for argument in options.extra_args):
        # On CPUs, vLLM 0.32 crashes on a seeded call whose prompt comes in chunks.
        given["--no-enable-chunked-prefill"] = None
    if options.lora_rank:
        fitting = [size for size in _LORA_RANKS if size >= options.lora_rank]
        if not fitting:
            raise ConfigError(f"model.lora_rank={options.lora_rank}: vLLM serves ranks up to {_LORA_RANKS[-1]}")
        given |= {"--enable-lora": None, "--max-lora-rank": str(fitting[0])}
    words = [word for flag, value in given.items() for word in ((flag,) if value is None else (flag, value))]
    return ["serve", options.model, *words, *options.extra_args]


def serve_environment(options: ServeOptions, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the server's environment: `base` (default: this process's), with defaults for variables that it lacks."""
    base = os.environ if base is None else base
    environment = {**_DEFAULT_ENVIRONMENT, **(_ON_CPU if options.on_cpu else {}), **base}
    # The server has packages of its own; of rllm it needs one file.
    environment["PYTHONPATH"] = str(PLUGIN)
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # the routes that take new weights; it listens on this machine only
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = options.devices
    return environment


def vllm_command(setting: str | None) -> list[str]:
    """Return vLLM's program: the one that is set, or else the one in this environment or on the PATH.

    Raises:
        ConfigError: if the program that is set does not exist.
        MissingDependencyError: if none is set or found.
    """
    if setting is not None:
        words = shlex.split(setting)
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"vllm.command={setting!r}: no such program; name the one in the environment that has vLLM, "
                "as in /opt/vllm/bin/vllm"
            )
        return words
    beside = Path(sys.executable).with_name("vllm")
    if importlib.util.find_spec("vllm") is not None and beside.exists():
        return [str(beside)]
    if (found := shutil.which("vllm")) is not None:
        return [found]
    raise MissingDependencyError(
        "model.engine=vllm needs vLLM, which is not installed here: run pip install vllm, preferably in an "
        "environment of its own, and name its program, as in vllm.command=/opt/vllm/bin/vllm; "
        "or join a server with vllm.url=http://HOST:PORT/v1"
    )
