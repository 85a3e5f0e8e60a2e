"""CPU platform for verl, so that a machine without GPUs can train, over gloo.

verl imports this module in every process that has `VERL_USE_EXTERNAL_MODULES=rllm.backends.verl.platform_cpu`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from rllm._runtime.process import peak_memory

NAME = "cpu"


def _device_module() -> types.ModuleType:
    """Return `torch.cpu` with the functions that verl expects in addition; used memory is the process's."""
    module = types.ModuleType("rllm_verl_cpu")
    vars(module).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    nothing = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "set_device")
    used = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    vars(module).update(
        dict.fromkeys(nothing, lambda *_, **__: None),
        **dict.fromkeys(used, lambda *_: peak_memory()),
        mem_get_info=lambda *_: (_memory("SC_AVPHYS_PAGES"), _memory("SC_PHYS_PAGES")),
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        get_device_name=lambda *_: NAME,
        current_device=lambda: torch.device(NAME),
    )
    return module


def _memory(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """One device without an index and without synchronization, whose resource in Ray is the CPU."""

    device_name = NAME
    vendor_name = NAME
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device(NAME)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is only one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: operations are synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the system's allocator has no settings."""

    def empty_cache(self) -> None:
        """Do nothing: a CPU has no cache to empty."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing, because CPUs are not profiled."""

    def profiler_stop(self) -> None:
        """Do nothing, because CPUs are not profiled."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
