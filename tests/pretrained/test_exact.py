"""The sampler and the trainer have the numbers of `transformers`, for a real model and natural language."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.inference.engine import ModelOutput
from rllm.trainer.config import load_config

pytestmark = pytest.mark.pretrained
ROUNDING = 1e-4
QUESTIONS = [
    "What is the capital of France?",
    "State the final answer to the following arithmetic problem: 12 + 30 =",
    "Write a haiku about the sea.",
    "Name three colours, separated by commas.",
]


@pytest.fixture(scope="module")
def backend(smollm: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend.from_config(load_config([f"model.path={smollm}", "model.device=cpu"]))
    yield backend
    backend.close()


def answers(backend: LocalBackend, conversations: Sequence[Any], **options: Any) -> list[ModelOutput]:
    """Answer all conversations at once."""

    async def all_answers() -> list[ModelOutput]:
        engine = backend.inference
        return await asyncio.gather(
            *(
                engine.get_model_response(messages, seed=place, **options)
                for place, messages in enumerate(conversations)
            )
        )

    return asyncio.run(all_answers())


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def logprobs_of(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return log-probabilities of each token of an answer, by one plain forward pass.  # [len(answer), vocabulary]"""
    ids = torch.tensor([[*prompt, *answer]])
    return (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def chosen(logprobs: Tensor, answer: Sequence[int]) -> Tensor:
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_turn_ends_at_the_end_token_of_the_template(backend: LocalBackend) -> None:
    """The folder's tokenizer has no pad token, and names the beginning of a turn as the end of a text."""
    assert (backend.tokenizer.pad_token, backend.tokenizer.eos_token) == (None, "<|im_start|>")
    [answer] = answers(backend, [asked(QUESTIONS[0])], temperature=0, max_tokens=32)
    assert "Paris" in (answer.content or "")
    assert (answer.finish_reason, answer.completion_ids[-1]) == ("stop", backend.tokenizer.encode("<|im_end|>")[0])


def test_greedy_answers_equal_those_of_generate(backend: LocalBackend, reference: Any) -> None:
    found = answers(backend, list(map(asked, QUESTIONS)), temperature=0, max_tokens=24)
    for answer in found:
        with torch.no_grad():
            ids = reference.generate(
                torch.tensor([answer.prompt_ids]),
                attention_mask=torch.ones(1, len(answer.prompt_ids)),
                do_sample=False,
                max_new_tokens=24,
            )
        assert ids[0, len(answer.prompt_ids) :].tolist() == answer.completion_ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probabilities_equal_a_forward_pass(
    backend: LocalBackend, reference: Any, temperature: float
) -> None:
    found = answers(
        backend,
        [asked(question) for question in QUESTIONS for _ in range(4)],
        temperature=temperature,
        max_tokens=24,
        logprobs=True,
        top_logprobs=20,
    )
    assert len({tuple(answer.completion_ids) for answer in found}) > 8
    for answer in found:
        with torch.no_grad():
            logprobs = logprobs_of(reference, answer.prompt_ids, answer.completion_ids, temperature)
        expected = chosen(logprobs, answer.completion_ids)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=ROUNDING, rtol=0)
        best = torch.tensor([[value for _, value in position] for position in answer.top_logprobs])
        torch.testing.assert_close(best, logprobs.topk(20).values, atol=ROUNDING, rtol=ROUNDING)


def test_trainer_log_probabilities_and_gradient_equal_a_forward_pass(backend: LocalBackend, reference: Any) -> None:
    """Groups that share their prompts, in several micro-batches, against one sequence after the other."""
    found = answers(backend, [asked(question) for question in QUESTIONS[:2] for _ in range(3)], max_tokens=16)
    batch = Batch.of([sequence_of(answer) for answer in found]).with_weights("seq-mean-token-mean")
    batch.advantages = torch.tensor([1.0, -0.5, -0.5, 2.0, -1.0, -1.0])[batch.sequence_of]
    batch.old_logprobs = backend.score(batch)

    pieces = [
        chosen(logprobs_of(reference, answer.prompt_ids, answer.completion_ids), answer.completion_ids)
        for answer in found
    ]
    expected = torch.cat(pieces)
    torch.testing.assert_close(batch.old_logprobs, expected.detach(), atol=ROUNDING, rtol=0)

    (-(batch.weights * batch.advantages) * expected).sum().backward()  # on policy, every ratio is 1
    backend.settings.micro_batch_tokens = 100
    assert len(list(batch.split(100))) > 1
    backend.accumulate(batch, GRPO())
    theirs = dict(reference.named_parameters())
    for name, weight in backend.model.named_parameters():
        difference, size = (weight.grad - theirs[name].grad).norm(), theirs[name].grad.norm()
        assert difference <= 1e-3 * size, name
    for model in (backend.model, reference):
        model.zero_grad()


def sequence_of(answer: ModelOutput) -> TokenSequence:
    start = len(answer.prompt_ids)
    ids = [*answer.prompt_ids, *answer.completion_ids]
    return TokenSequence(ids=ids, spans=[StepSpan(step_id="a", start=start, stop=len(ids))], logprobs=answer.logprobs)


def test_later_turns_continue_the_sampled_tokens(backend: LocalBackend) -> None:
    """Including a truncated answer, which the template ends."""
    engine: Any = backend.inference
    messages: list[dict[str, str]] = asked(QUESTIONS[2])
    turns: list[ModelOutput] = []
    for _ in range(3):
        options = {}
        if turns:
            known = [*turns[-1].prompt_ids, *turns[-1].completion_ids]
            options["prompt_token_ids"] = engine.continued_prompt(known, messages, len(messages) - 1)
        [answer] = answers(backend, [messages], max_tokens=12, **options)
        turns.append(answer)
        messages = [*messages, {"role": "assistant", "content": answer.content or ""}, *asked("And another one?")]
    for one, other in pairwise(turns):
        known = [*one.prompt_ids, *one.completion_ids]
        assert other.prompt_ids[: len(known)] == known
        assert backend.tokenizer.decode(other.prompt_ids[len(known) :]).endswith("<|im_start|>assistant\n")
