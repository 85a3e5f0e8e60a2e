from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllm.trainer.config import load_config
from rllm.trainer.settings import bytes_of_token, fitted_to_memory

GB, CPU = 10**9, "model.device=cpu"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Of the sizes of 79 million weights."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6}
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "vocab_size": 1000, **heads}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return f"model.path={tmp_path}"


def test_what_a_token_takes(model: str) -> None:
    of_layer = 6 * 768 + 3 * (768 + 2 * 384) + 2 * 2048  # 13,312
    assert bytes_of_token(load_config([model, CPU])) == 4 * 12 * of_layer == 638_976
    assert bytes_of_token(load_config([model, CPU, "model.dtype=bfloat16"])) == 638_976 // 2
    recomputed = load_config([model, CPU, "model.gradient_checkpointing=true"])
    assert bytes_of_token(recomputed) == 4 * (12 * 768 * 3 // 2 + of_layer)


@pytest.mark.parametrize(
    ("memory", "asked", "taken"),
    [
        (25 * GB, [], 9 * 1024),  # 9,781 tokens have room in a quarter
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
