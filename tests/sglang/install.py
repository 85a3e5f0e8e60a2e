"""Install SGLang for CPUs into its own environment, over that of the vLLM tests, whose torch it shares.

    python tests/sglang/install.py VLLM_FOLDER FOLDER

Its wheel asks for CUDA's libraries by the gigabyte, so it is installed without its dependencies. Two things are then missing: its
kernels, which are published for GPUs only, and whose place is taken by a module that names each of them and raises if it is called,
as SGLang's paths through plain PyTorch never do; and the operators of torchvision, whose library needs CUDA's: they are declared.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "sglang==0.5.23",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "orjson==3.13.0",
    "soundfile==0.14.0",
    "torchvision==0.28.0",
    "traitlets==5.16.1",
)
KERNELS = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on CPUs")

    return kernel
"""
OPERATORS = """import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def main(vllm: Path, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (shared,) = (vllm / "lib").glob("python*/site-packages")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", *PACKAGES], check=True)
    (packages / "shared.pth").write_text(f"{shared}\n")
    (packages / "sgl_kernel.py").write_text(KERNELS)
    torchvision = packages / "torchvision" / "__init__.py"
    torchvision.write_text(OPERATORS + torchvision.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
