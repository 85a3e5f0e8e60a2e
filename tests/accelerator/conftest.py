"""A device other than the CPU: the one that `RLLM_TEST_DEVICE` names, or one made for the tests (`device.cpp`)."""

from __future__ import annotations

import os
import shutil
import sysconfig
import types
from pathlib import Path

import pytest
import torch

NAME = "strict"


@pytest.fixture(scope="session", autouse=True)
def device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Register the device with PyTorch, and return its name."""
    if named := os.environ.get("RLLM_TEST_DEVICE"):
        return named
    if not shutil.which(os.environ.get("CXX", "c++")) or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs a C++ compiler and Python's headers")
    from torch.utils import cpp_extension  # takes half a second, which only these tests need

    source = Path(__file__).with_name("device.cpp")
    folder = tmp_path_factory.mktemp("device")
    cpp_extension.load("rllm_strict_device", [str(source)], build_directory=str(folder), extra_cflags=["-O1", "-w"])
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return NAME


def _module() -> types.ModuleType:
    """Return the module `torch.strict` with its operations."""
    module = types.ModuleType(NAME)
    for name, given in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }.items():
        setattr(module, name, given)
    return module
