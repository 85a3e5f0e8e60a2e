"""The ways in which a running server takes new weights; which of them is used depends on what the server has."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rllm.errors import ConfigError
from rllm.inference.sglang.control import UPDATE_ROUTE, DiskUpdate
from rllm.inference.vllm.control import HEAVY_S, VLLMControl

WEIGHTS_FILE = "model.safetensors"
FILE_BACKEND = "rllm_file"
"""The name of our weight transfer; see `plugin/rllm_vllm.py`."""
_RESTART = "start it as `rllm doctor --base-url URL` shows, or leave out vllm.url and let rllm start one of its own"


class Handover(Protocol):
    """Hands weights over that lie in a folder, while the server is paused."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def shows_bits(self) -> bool:
        """Whether the server can be asked for the bits of the weights that it has."""
        ...

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        """Make the server use these weights.

        Raises:
            InferenceError: if it says that it does not.
        """
        ...


class FileTransfer:
    """In place, through vLLM's own weight transfer and our engine for it: nothing is loaded but the tensors."""

    name = "transfer"
    shows_bits = True

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        control.post("/start_weight_update")
        control.post("/update_weights", {"update_info": {"path": str(folder / WEIGHTS_FILE)}}, timeout_s=HEAVY_S)
        control.post("/finish_weight_update", timeout_s=HEAVY_S)


class LoraLoad:
    """An adapter in peft's form, in the place of the one of the same name."""

    name = "lora"
    shows_bits = False

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        adapter = {"lora_name": served_name, "lora_path": str(folder), "load_inplace": True}
        control.post("/v1/load_lora_adapter", adapter, timeout_s=HEAVY_S)


class Reload:
    """All weights anew from disk, for servers without our extension."""

    name = "reload"
    shows_bits = False

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        control.post("/collective_rpc", reload, timeout_s=HEAVY_S)


def choose_handover(control: VLLMControl, *, lora: bool) -> Handover:
    """The fastest way that the server offers.

    Raises:
        ConfigError: if it offers none.
    """
    routes = control.routes()
    if UPDATE_ROUTE in routes:
        return _of_sglang(control, lora=lora)
    lacking = {"/pause", "/resume", "/reset_prefix_cache", "/update_weight_version", "/weight_info"} - routes
    if lacking:
        raise ConfigError(
            f"vllm.url={control.base_url!r}: this server takes no new weights, as it lacks {', '.join(sorted(lacking))} "
            f"(VLLM_SERVER_DEV_MODE=1): {_RESTART}"
        )
    if lora:
        if "/v1/load_lora_adapter" not in routes:
            raise ConfigError(
                f"vllm.url={control.base_url!r}: this server takes no adapters while it runs (--enable-lora and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), and model.lora_rank is set: {_RESTART}"
            )
        return LoraLoad()
    if "/update_weights" in routes and control.transfer_backend() == FILE_BACKEND:
        return FileTransfer()
    return Reload()


def _of_sglang(control: VLLMControl, *, lora: bool) -> Handover:
    if lora:
        raise ConfigError(
            f"vllm.url={control.base_url!r}: this is SGLang, to which rllm hands whole models only, and model.lora_rank is set: "
            "leave model.lora_rank out, or use vLLM"
        )
    return DiskUpdate()
