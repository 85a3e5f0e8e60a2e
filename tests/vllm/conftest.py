"""A real vLLM on the CPU, over a small random model; started once. `make test-vllm` installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..ports import free_port

START_S = 900.0
FLAGS = """--served-model-name policy --host 127.0.0.1 --dtype float32 --enforce-eager --logprobs-mode processed_logprobs
    --enable-auto-tool-choice --tool-call-parser hermes""".split()
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # gigabytes; else a share of all memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less to start
}


@dataclass(frozen=True)
class VLLM:
    """The server, and the model that it serves."""

    url: str
    """Up to and including `/v1`."""
    folder: Path
    model: Any
    tokenizer: Any


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

    command = Path(os.environ.get("RLLM_TEST_VLLM", ".vllm")) / "bin" / "vllm"
    assert command.exists(), f"{command} is not there: run `make test-vllm`"
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = train_tokenizer(["the user asks the assistant, and the assistant answers\n"] * 50, vocab_size=600)
    # Heads of 32: vLLM's attention on CPUs has no others that are as small.
    recipe = TinyPolicyRecipe(hidden_size=128, num_layers=2, num_heads=4, num_key_value_heads=2, intermediate_size=256)
    model = new_model(tokenizer, recipe)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    port = free_port()
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "serve", folder / "model", "--port", str(port), *FLAGS],
            env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _await(process, f"http://127.0.0.1:{port}/health", log)
        yield VLLM(url=f"http://127.0.0.1:{port}/v1", folder=folder / "model", model=model.eval(), tokenizer=tokenizer)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.stderr.write(log.read_text(errors="replace")[-5000:])
    pytest.fail("vLLM did not start; its log is above")
