"""ECHO: tokens between the policy's answers are predicted in addition to the policy's loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.echo import num_observed, with_observations
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.reinforce import Reinforce
from rllm.algorithms.sft import SFT
from rllm.backends.local.backend import LocalBackend
from rllm.backends.update import update_weights
from rllm.errors import ConfigError

MakeBackend = Callable[..., LocalBackend]
IDS = [7, 8, 20, 21, 30, 31, 32, 22, 33, 23]
"""Prompt 7 8, answers 20 21 | 22 | 23, with observations 30 31 32 | 33 between them."""
BOUNDS = [(2, 4), (7, 8), (9, 10)]


def conversation(*bounds: tuple[int, int]) -> TokenSequence:
    spans = [StepSpan(step_id=str(place), start=start, stop=stop) for place, (start, stop) in enumerate(bounds)]
    return TokenSequence(ids=IDS, spans=spans, logprobs=[-1.0] * sum(stop - start for start, stop in bounds))


def gradient(backend: LocalBackend, batch: Batch, algorithm: Algorithm, **options: float) -> tuple[Tensor, float]:
    """Return the flattened gradient, and the loss."""
    _, sums = backend.accumulate(batch, algorithm, **options)
    found = [weight.grad.flatten() for weight in backend.model.parameters() if weight.grad is not None]
    backend.model.zero_grad()
    return torch.cat(found), sums["loss"]


def test_tokens_between_responses_are_observations_and_the_prompt_is_not() -> None:
    batch = Batch.of([conversation(*BOUNDS), conversation((2, 10))])
    wide, own = with_observations(batch)
    assert wide.ids.tolist() == IDS[2:] * 2
    assert own.tolist() == [True, True, False, False, False, True, False, True] + [True] * 8
    assert wide.ids[own].equal(batch.ids)
    assert num_observed(batch) == 4


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_loss_includes_the_mean_cross_entropy_of_observations(make_backend: MakeBackend, scale: float) -> None:
    batch = Batch.of([conversation(*BOUNDS), conversation((2, 3), (9, 10))])
    batch.advantages = torch.linspace(-1, 1, batch.num_tokens)
    seen = Batch.of([conversation((4, 7), (8, 9)), conversation((3, 9))])
    seen.advantages = torch.ones(seen.num_tokens)
    backend = make_backend()
    plain, plain_loss = gradient(backend, batch, Reinforce(), scale=scale)
    added, added_loss = gradient(backend, seen, SFT())
    found, loss = gradient(backend, batch, Reinforce(observation_coef=0.3), scale=scale)
    torch.testing.assert_close(found, plain + 0.3 * added, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(plain_loss + 0.3 * added_loss, rel=1e-5)


def test_micro_batches_do_not_change_the_loss(make_backend: MakeBackend) -> None:
    batch = Batch.of([conversation(*BOUNDS), conversation((2, 3), (9, 10))])
    one, _ = gradient(make_backend(), batch, GRPO(observation_coef=0.3))
    other, _ = gradient(make_backend(micro_batch_tokens=1), batch, GRPO(observation_coef=0.3))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rollouts_without_advantage_train_on_observations(make_backend: MakeBackend) -> None:
    assert GRPO(observation_coef=0.1).learns_without_advantage
    batch, backend = Batch.of([conversation(*BOUNDS)]), make_backend(lr=1e-2)
    found = [update_weights(backend, batch, GRPO(observation_coef=1.0)).metrics for _ in range(3)]
    surprises = [metrics["policy/observation_nll"] for metrics in found]
    assert surprises == sorted(surprises, reverse=True)
    assert surprises[0] > surprises[-1] + 0.1


def test_unsupported_combinations_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.observation_coef=-1\.0: use 0 \(off\)"):
        GRPO(observation_coef=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.observation_coef=0\.1: demonstrations are not sampled"):
        SFT(observation_coef=0.1)
