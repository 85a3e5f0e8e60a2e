from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllm.trainer.config import load_config
from rllm.trainer.settings import bytes_of_token, fitted_to_memory

GB, CPU = 10**9, "model.device=cpu"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Of 79 million weights; a pass was measured to keep 994 kB of each token."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return f"model.path={tmp_path}"


def test_what_a_token_takes(model: str) -> None:
    assert bytes_of_token(load_config([model, CPU])) == 4 * 12 * (16 * 768 + 5 * 2048) == 1_081_344
    assert bytes_of_token(load_config([model, CPU, "model.dtype=bfloat16"])) == 1_081_344 // 2
    assert bytes_of_token(load_config([model, CPU, "model.gradient_checkpointing=true"])) == 4 * (
        12 * 768 + 16 * 768 + 5 * 2048
    )


@pytest.mark.parametrize(
    ("memory", "asked", "taken"),
    [
        (25 * GB, [], 5 * 1024),  # 5,779 tokens have room in a quarter
        (100 * GB, [], 16384),
        (1 * GB, [], 1024),
        (25 * GB, ["optim.micro_batch_tokens=16384"], 16384),
        (25 * GB, ["backend=verl"], 16384),
        (25 * GB, ["model.path=Qwen/Qwen3-0.6B"], 16384),
    ],
)
def test_micro_batches_fit_memory_unless_set(model: str, memory: int, asked: list[str], taken: int) -> None:
    config = load_config([model, CPU, *asked])
    assert fitted_to_memory(config, memory).optim.micro_batch_tokens == taken
