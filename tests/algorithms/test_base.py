"""Options that all algorithms share, and the terms of the loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms import ALGORITHMS
from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import kl_divergence
from rllm.algorithms.ppo import PPO
from rllm.algorithms.reinforce import Reinforce, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rllm.errors import ConfigError
from rllm.registry import resolve

from .values import batch_of, gradient, group_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 0.0}, r"algorithm\.clip_low=0\.0: use a number above 0"),
        ({"clip_low": -0.1}, r"algorithm\.clip_low=-0\.1"),
        ({"clip_low": 1.5}, r"algorithm\.clip_low=1\.5: .*up to 1"),
        ({"clip_low": math.nan}, r"algorithm\.clip_low=nan"),
        ({"clip_high": 0.0}, r"algorithm\.clip_high=0\.0"),
        ({"dual_clip": 1.1}, r"algorithm\.dual_clip=1\.1: use a number above 1 \+ algorithm\.clip_high"),
        ({"gamma": 0.0}, r"algorithm\.gamma=0\.0"),
        ({"gamma": 1.5}, r"algorithm\.gamma=1\.5"),
        (
            {"gamma": 0.9},
            r"algorithm\.gamma=0\.9: it has no effect without algorithm\.level=step or algorithm\.step_coef; set",
        ),
        ({"kl_coef": -1.0}, r"algorithm\.kl_coef=-1\.0"),
        ({"kl_coef": math.inf}, r"algorithm\.kl_coef=inf"),
        ({"entropy_coef": math.nan}, r"algorithm\.entropy_coef=nan: use 0 \(off\) or a number"),
        ({"entropy_coef": math.inf}, r"algorithm\.entropy_coef=inf"),
        ({"teacher_coef": math.inf}, r"algorithm\.teacher_coef=inf"),
        ({"kl_in": "reward"}, r"algorithm\.kl_in='reward': nothing is subtracted with algorithm\.kl_coef=0"),
        ({"correction": "mask", "correction_cap": 0.5}, r"algorithm\.correction_cap=0\.5: use at least 1"),
        (
            {"correction_cap": 3.0},
            r"algorithm\.correction_cap=3\.0: it has no effect without algorithm\.correction; set that, too",
        ),
        ({"correction": "mask", "correction_floor": 1.5}, r"correction_floor=1\.5: use a number from 0 to 1"),
        ({"correction_floor": 0.5}, r"correction_floor=0\.5: it has no effect without algorithm\.correction"),
        (
            {"correction_level": "sequence"},
            r"correction_level='sequence': it has no effect without algorithm\.correction",
        ),
        ({"kl_estimator": "k1"}, r"kl_estimator='k1': it has no effect without algorithm\.kl_coef"),
        ({"aggregation": "fixed-length"}, r"algorithm\.fixed_length=None: .*use the value of rollout\.max_tokens"),
        ({"aggregation": "fixed-length", "fixed_length": 0}, r"algorithm\.fixed_length=0"),
        ({"fixed_length": 8}, r"algorithm\.fixed_length=8: only algorithm\.aggregation=fixed-length uses it"),
    ],
)
def test_invalid_settings_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Algorithm(**fields)


def test_level_step_is_rejected_by_algorithms_that_credit_tokens() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.level='step': this algorithm credits single tokens"):
        PPO(level="step")


@pytest.mark.parametrize(
    ("algorithm", "reference", "scores", "all_tokens"),
    [
        (Reinforce(), False, False, False),
        (Reinforce(kl_coef=0.1), True, False, True),
        (Reinforce(kl_coef=0.1, kl_in="reward"), True, True, False),
        (Reinforce(entropy_coef=0.1), False, False, True),
        (PPO(), False, True, True),
    ],
)
def test_algorithm_states_its_requirements(
    algorithm: Algorithm, reference: bool, scores: bool, all_tokens: bool
) -> None:
    assert algorithm.needs_reference is reference
    assert algorithm.needs_scores is scores
    assert algorithm.learns_without_advantage is all_tokens


@pytest.mark.parametrize("method", ["credit", "token_advantages", "value_loss"])
def test_incomplete_algorithm_names_the_missing_method(method: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "credit": (group_of(1.0),),
        "token_advantages": (batch_of([1.0]),),
        "value_loss": (torch.zeros(1), batch_of([1.0])),
    }
    with pytest.raises(NotImplementedError, match=f"Algorithm must define {method}"):
        getattr(Algorithm(), method)(*arguments[method])


POLICY_GRADIENT = [name for name in ALGORITHMS if name != "dr_grpo"]


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_gradient_of_the_first_update_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 the derivative of the loss by a token's log-probability is minus its weight times its advantage."""
    algorithm = resolve(name, ALGORITHMS)()
    batch = batch_of([2.0, -1.0], [0.5], sampler_logprobs=[-0.3, -4.0, -1.0]).with_weights(algorithm.aggregation)
    got = gradient(lambda logprobs: algorithm.loss(logprobs, batch)[0], [-0.3, -4.0, -1.0])
    assert got == pytest.approx((-batch.advantages * batch.weights).tolist())


def test_divergence_is_added_to_the_loss() -> None:
    batch = batch_of([0.0, 0.0], ref_logprobs=[-1.0, -1.0])
    algorithm = Reinforce(kl_coef=0.5, kl_estimator="k1")
    loss, sums = algorithm.loss(torch.tensor([-0.5, -2.0]), batch)
    assert loss.item() == pytest.approx(0.5 * (0.5 - 1.0) / 2)
    assert sums["policy/kl"].item() == pytest.approx(-0.5)
    got = gradient(lambda logprobs: algorithm.loss(logprobs, batch)[0], [-0.5, -2.0])
    assert got == pytest.approx([0.5 * 0.5 / 2, 0.5 * -1.0 / 2]), "the log-ratio itself, at half weight"


def test_divergence_in_the_reward_is_not_subtracted_twice() -> None:
    batch = batch_of([0.0], ref_logprobs=[-1.0])
    loss, sums = Reinforce(kl_coef=0.5, kl_in="reward", kl_estimator="k1").loss(torch.tensor([-0.5]), batch)
    assert (loss.item(), sums["policy/kl"].item()) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("algorithm", "in_loss"), [(Reinforce, "k3"), (ReinforcePlusPlus, "k1"), (ReinforcePlusPlusBaseline, "k2")]
)
def test_default_estimator_has_the_right_gradient(algorithm: type[Algorithm], in_loss: str) -> None:
    assert algorithm(kl_coef=0.1).settings()["kl_estimator"] == in_loss
    assert algorithm(kl_coef=0.1, kl_in="reward").settings()["kl_estimator"] == "k1"
    assert algorithm(kl_coef=0.1, kl_in="reward", kl_estimator="k3").settings()["kl_estimator"] == "k3"


def test_divergence_in_the_reward_has_its_gradient() -> None:
    """Subtracting the loss from the reward gives, in expectation, the gradient of the divergence."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.2, 0.0, -0.6], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    estimator = Reinforce(kl_coef=0.1, kl_in="reward").divergence_estimator
    lost = kl_divergence(logprobs.detach(), reference, estimator)
    (got,) = torch.autograd.grad((logprobs.exp().detach() * lost * logprobs).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_entropy_is_rewarded() -> None:
    batch = batch_of([1.0, 1.0])
    loss, _ = Reinforce(entropy_coef=0.1).loss(torch.zeros(2), batch, entropy=torch.tensor([2.0, 4.0]))
    assert loss.item() == pytest.approx(-1.0 - 0.1 * 3.0)


def corrected(batch: Batch, **fields: Any) -> Tensor:
    """Return the gradient with respect to each token, times their number; all advantages are -1."""
    algorithm = GRPO(**fields)
    assert batch.old_logprobs is not None
    got = gradient(lambda logprobs: algorithm.loss(logprobs, batch)[0], batch.old_logprobs.tolist())
    return torch.tensor(got) * batch.num_tokens


def test_mismatch_of_sampler_and_trainer_is_corrected() -> None:
    # Ratios of trainer and sampler: 4, 1 | 1/4; by sequence: 2, 2 | 1/4.
    log = math.log
    batch = batch_of([-1.0, -1.0], [-1.0], old_logprobs=[-1 + log(4), -1.0, -1 - log(4)])
    assert corrected(batch).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert corrected(batch, correction="truncate").tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert corrected(batch, correction="mask").tolist() == pytest.approx([0.0, 1.0, 0.0])
    ice_pop = {"correction_cap": 5.0, "correction_floor": 0.5}
    assert corrected(batch, correction="mask", **ice_pop).tolist() == pytest.approx([4.0, 1.0, 0.0])
    assert corrected(batch, correction="truncate", correction_floor=0.5).tolist() == pytest.approx([2.0, 1.0, 0.5])
    by_sequence = {"correction_level": "sequence", "correction_cap": 3.0}
    assert corrected(batch, correction="truncate", **by_sequence).tolist() == pytest.approx([2.0, 2.0, 0.25])
    assert corrected(batch, correction="mask", **by_sequence).tolist() == pytest.approx([2.0, 2.0, 0.0])
    _, sums = GRPO(correction="truncate").loss(torch.full((3,), -1.0), batch)
    assert sums["policy/correction"].item() == pytest.approx(2.0 + 1.0 + 0.25)


@pytest.mark.parametrize("name", [name for name in POLICY_GRADIENT if name != "sft"])
def test_loss_of_a_batch_is_the_sum_over_its_parts(name: str) -> None:
    kind = resolve(name, ALGORITHMS)
    corrected = {} if kind.of_sampler else {"correction": "truncate", "correction_level": "sequence"}
    algorithm = kind(kl_coef=0.1, **corrected)
    batch = batch_of(
        [2.0, -1.0], [0.5], [1.0, 1.0], old_logprobs=[-1.0, -2.0, -0.5, -1.5, -3.0], ref_logprobs=[-1.0] * 5
    ).with_weights(algorithm.aggregation)
    logprobs = torch.tensor([-1.1, -1.7, -0.5, -1.0, -3.5])
    whole, _ = algorithm.loss(logprobs, batch)
    parts = [([0, 2], [0, 1, 3, 4]), ([1], [2])]
    assert sum(algorithm.loss(logprobs[tokens], batch.select(rows))[0].item() for rows, tokens in parts) == (
        pytest.approx(whole.item())
    )
