"""What the machine has: Python, GPUs, memory, disk, a free port."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from rllm._runtime.process import free_memory, total_memory
from rllm.errors import ConfigError
from rllm.gateway.server import bind
from rllm.inference.servers.capabilities import Finding
from rllm.trainer.nodes import gpus_of_driver, nearest_folder, why_unwritable

GB = 1e9
LITTLE_DISK = 5 * GB
"""Free space below which a run is likely to end early, whatever its model."""
OLDEST_PYTHON = (3, 11)


def python() -> Finding:
    """The interpreter."""
    ok = sys.version_info >= OLDEST_PYTHON
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    return Finding(name="python", ok=ok, said=said, fix="" if ok else "make an environment with Python 3.11 or newer")


def gpus() -> Finding:
    """What torch sees, beside what the driver does."""
    driver = gpus_of_driver()
    try:
        import torch
    except ImportError as error:
        said = f"{', '.join(driver) or 'none'}; torch cannot be imported ({error})"
        return Finding(name="gpu", ok=not driver, said=said, fix="pip install 'rllm[train]'" if driver else "")
    if torch.cuda.is_available():
        free = (torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count()))
        names = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        each = (
            f"{name}, {left / GB:.0f} of {total / GB:.0f} GB free"
            for name, (left, total) in zip(names, free, strict=True)
        )
        return Finding(name="gpu", ok=True, said="; ".join(each))
    if driver:
        fix = "install a build of torch for its driver: see https://pytorch.org/get-started/locally"
        said = f"{'; '.join(driver)}, which torch {torch.__version__} cannot use"
        return Finding(name="gpu", ok=False, said=said, fix=fix)
    apple = torch.backends.mps.is_available()
    more = ", unless model.device=mps, which is not tested" if apple else ""
    return Finding(name="gpu", ok=True, said=f"{'Apple' if apple else 'none'}: models run on the CPU{more}")


def memory(needed: float | None) -> Finding:
    """Main memory; and where models run in it, whether it holds `needed` bytes."""
    free = free_memory()
    said = f"{total_memory() / GB:.1f} GB" if free is None else f"{free / GB:.1f} GB free"
    if needed is None:
        return Finding(name="memory", ok=True, said=said)
    room = max([total_memory() if free is None else free, *_free_on_gpus()])
    said += f"; training all weights takes {needed / GB:.1f} GB beside activations"
    fix = "" if needed <= room else "set model.lora_rank=16, or take a smaller model or a larger machine"
    return Finding(name="memory", ok=needed <= room, said=said, fix=fix)


def disk(folder: Path, needed: float | None) -> Finding:
    """Free space where runs are written; `needed` is what one checkpoint takes, in bytes."""
    nearest = nearest_folder(str(folder.absolute()))
    if not nearest.is_dir():
        return Finding(name="disk", ok=False, said=f"{nearest} is a file", fix="set run_dir (--run-dir) to a folder")
    if (why := why_unwritable(nearest)) is not None:
        said = f"{nearest} cannot be written to ({why})"
        return Finding(name="disk", ok=False, said=said, fix="set run_dir (--run-dir) to a folder of yours")
    free = shutil.disk_usage(nearest).free
    said = f"{free / GB:.1f} GB free at {folder}"
    least = max(LITTLE_DISK, 3 * (needed or 0.0))  # two checkpoints stay, and a third is made
    if needed is not None:
        said += f"; a checkpoint takes about {needed / GB:.1f} GB"
    fix = "" if free >= least else "set run_dir to a larger file system, or keep_checkpoints=1"
    return Finding(name="disk", ok=free >= least, said=said, fix=fix)


def reachable_port(port: int) -> Finding:
    """Whether `rllm gateway` could listen there; a training run takes any free port."""
    try:
        bind("127.0.0.1", port).close()
    except ConfigError as error:
        fix = "rllm gateway --port N takes another; training takes any free one"
        return Finding(name="port", ok=False, said=str(error), needed=False, fix=fix)
    return Finding(name="port", ok=True, said=f"127.0.0.1:{port} is free")


def _free_on_gpus() -> list[float]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))]
