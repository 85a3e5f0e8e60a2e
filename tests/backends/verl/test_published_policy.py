"""The policy published by verl's workers is sampled like that of the local backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.backends.verl.backend import PublishedPolicy
from rllm.inference.local.packed import multiplies_bfloat16
from rllm.trainer.config import load_config


@pytest.fixture
def folder(make_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("autocast", [False, True])
async def test_autocast_rounds_where_the_trainer_does(folder: Path, autocast: bool) -> None:
    config = load_config(["backend=verl", f"model.path={folder}", f"optim.autocast={autocast}"])
    policy = PublishedPolicy(config, dtype="float32", device="cpu")
    try:
        engine: Any = policy.engine
        output = await engine.complete(list(range(5, 45)), max_tokens=20, ignore_eos=True)
        with torch.no_grad():
            logits = engine.model(torch.tensor([output.prompt_ids + output.completion_ids])).logits[0].log_softmax(-1)
        answer = logits[len(output.prompt_ids) - 1 : -1].gather(1, torch.tensor(output.completion_ids)[:, None])[:, 0]
        gap = float((torch.tensor(output.logprobs) - answer).abs().max())
        assert (gap > 1e-5) == (autocast and multiplies_bfloat16())
    finally:
        policy.close()
