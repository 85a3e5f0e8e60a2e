from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

USER = [{"role": "user", "content": "the user asks the assistant"}]


def forward_logprobs(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[completion, vocabulary] at temperature 1, from one plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def assert_exact(engine: Any, output: Any) -> None:
    expected = forward_logprobs(engine.model, output.prompt_ids, output.completion_ids)
    chosen = expected.gather(1, torch.tensor(output.completion_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(output.logprobs), chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
async def test_ragged_concurrent_logprobs_equal_a_plain_forward_pass(make_engine: Any, family: str) -> None:
    engine = make_engine(family, max_concurrent=5)
    prompts = [list(range(5, 5 + length)) for length in (1, 2, 9, 17, 40, 40, 40, 41, 64, 100)]
    outputs = await asyncio.gather(
        *(engine.complete(prompt, max_tokens=8 + i, ignore_eos=True) for i, prompt in enumerate(prompts))
    )
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.prompt_ids == prompt
        assert len(output.completion_ids) == len(output.logprobs) == 8 + i
        assert_exact(engine, output)
    assert engine.stats()["cached_prompt_tokens"] > 0
