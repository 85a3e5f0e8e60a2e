"""A real SGLang on the CPU, over a small random model. `make test-sglang` installs it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllm.inference.servers.control import SGLangControl
from rllm.inference.servers.vllm_server import ServerProcess, free_port

START_S = 900.0
ARGUMENTS = """--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
    --mem-fraction-static 0.2 --max-total-tokens 20000 --context-length 1024 --disable-overlap-schedule --disable-cuda-graph
    --skip-server-warmup --sleep-on-idle --tool-call-parser qwen25"""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}


@dataclass(frozen=True)
class SGLang:
    """The server, and the model that it was started with."""

    url: str
    folder: Path
    model: Any
    tokenizer: Any


@pytest.fixture(scope="session")
def python() -> str:
    """Program of the environment that `make test-sglang` installs."""
    found = Path(os.environ.get("RLLM_TEST_SGLANG", ".sglang")).absolute() / "bin" / "python"
    assert found.exists(), f"{found} is not there: run `make test-sglang`"
    return str(found)


@pytest.fixture(scope="session")
def sglang(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

    folder, port = tmp_path_factory.mktemp("sglang"), free_port()
    tokenizer = train_tokenizer(["the user asks the assistant, and the assistant answers\n"] * 50, vocab_size=600)
    model = new_model(tokenizer, TinyPolicyRecipe(hidden_size=128, num_layers=2, intermediate_size=256)).eval()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    place = ["--model-path", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    command = [python, "-m", "sglang.launch_server", *place, *ARGUMENTS.split()]
    process = ServerProcess(command, {**os.environ, **ENVIRONMENT, "PYTHONPATH": ""}, folder / "sglang.log")
    try:
        await_health(process, f"http://127.0.0.1:{port}/v1")
        yield SGLang(f"http://127.0.0.1:{port}/v1", folder / "model", model, tokenizer)
    finally:
        process.stop()


def await_health(process: ServerProcess, url: str) -> None:
    control, deadline = SGLangControl(url), time.monotonic() + START_S
    while not control.is_healthy():
        assert process.exit_code is None, process.why_it_ended()
        assert time.monotonic() < deadline, process.why_it_ended()
        time.sleep(0.5)
