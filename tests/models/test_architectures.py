"""Architectures of `transformers`: a tiny random model of each loads, is sampled and trained exactly, or is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.testing.tiny_policy import train_tokenizer

from .architectures import ARCHITECTURES, save_tiny, tried

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-4
"""Allowed difference of log-probabilities."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["what is the price of an apple"] * 4, vocab_size=300)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampler_trainer_and_transformers_agree(name: str, lora: bool, tokenizer: Any, tmp_path: Path) -> None:
    """Before an update and after it; answers of a group share their prompt, and prompts their beginning."""
    architecture = ARCHITECTURES[name]
    save_tiny(name, tokenizer, tmp_path)
    if architecture.is_refused:
        with pytest.raises(ConfigError, match="mamba-ssm"):
            tried(tmp_path, lora=lora)
        return
    trial = tried(tmp_path, lora=lora)
    assert trial.sampler_gap < TOLERANCE
    assert trial.trainer_gap < TOLERANCE
    assert trial.moved > 100 * TOLERANCE
    assert (trial.is_batched, trial.is_tree) == (architecture.is_batched, architecture.is_tree)
