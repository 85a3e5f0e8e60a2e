"""Our arithmetic against that of verl, on the same random numbers; deliberate differences are explained in the tests."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Aggregation
from rllm.algorithms.dppo import DPPO
from rllm.algorithms.grpo import CISPO, GRPO, GSPO
from rllm.algorithms.losses import KLEstimator, importance_weights, kl_divergence
from rllm.algorithms.otb import OTB
from rllm.algorithms.ppo import PPO
from rllm.algorithms.reinforce import OPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax
from rllm.algorithms.sapo import SAPO
from rllm.types import Trajectory

from .rows import GROUP_SIZE, Rows

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]

SEEDS = pytest.mark.parametrize("rows", [Rows(seed) for seed in range(8)], ids=str)


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    return importlib.import_module("verl.trainer.ppo.core_algos")


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def outcome_advantages(compute: Any, rows: Rows, **arguments: Any) -> Tensor:
    """Return [N] results of one of verl's estimators for the scores."""
    index = np.array(rows.groups_of)
    given = {"token_level_rewards": rows.score_rows.clone(), "response_mask": rows.mask, "index": index, **arguments}
    return rows.flat(compute(**given)[0])


def by_group(algorithm: Algorithm, rows: Rows) -> Tensor:
    return rows.by_token(algorithm.credits(rows.groups()))


@SEEDS
def test_grpo_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    """Ours are population deviations, theirs sample deviations, larger by the root of n / (n - 1)."""
    compute = verl.compute_grpo_outcome_advantage
    plain = outcome_advantages(compute, rows, norm_adv_by_std_in_grpo=False)
    assert_close(by_group(GRPO(normalize_std=False), rows), plain)
    normalized = outcome_advantages(compute, rows, norm_adv_by_std_in_grpo=True)
    assert_close(by_group(GRPO(), rows), normalized * (GROUP_SIZE / (GROUP_SIZE - 1)) ** 0.5)


@SEEDS
def test_rloo_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    assert_close(by_group(RLOO(), rows), outcome_advantages(verl.compute_rloo_outcome_advantage, rows))


@SEEDS
def test_opo_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    assert_close(by_group(OPO(), rows), outcome_advantages(verl.compute_opo_outcome_advantage, rows))


@SEEDS
def test_remax_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    groups = rows.groups()
    for number, group in enumerate(groups):
        group.references = [Trajectory(reward=0.25 * number, trainable=False)]
    baselines = torch.tensor([0.25 * group for group in rows.groups_of])
    theirs = outcome_advantages(verl.compute_remax_outcome_advantage, rows, reward_baselines=baselines)
    assert_close(rows.by_token(ReMax().credits(groups)), theirs)


@SEEDS
def test_otb_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    batch, squares = rows.batch(), rows.random("squares", 0.0, 1.0)
    batch.rewards = rows.flat(rows.score_rows)
    batch.trajectory_of, batch.group_of = batch.sequence_of, torch.tensor(rows.groups_of)[batch.sequence_of]
    assert batch.old_logprobs is not None
    batch.energies = 1 - 2 * batch.old_logprobs.exp() + squares
    theirs = outcome_advantages(
        verl.compute_multi_turn_optimal_token_baseline_advantage,
        rows,
        old_log_probs=rows.pad(batch.old_logprobs),
        sum_pi_squared=rows.pad(squares),
    )
    assert_close(OTB().token_advantages(batch)[0], theirs)


def as_ours(whitened: Tensor) -> Tensor:
    """Convert values divided by the deviation of a sample, as verl's are, to those divided by the population's."""
    return whitened * (len(whitened) / (len(whitened) - 1)) ** 0.5


@SEEDS
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_agrees_with_verl(verl: ModuleType, rows: Rows, gamma: float) -> None:
    batch = rows.batch()
    batch.rewards = rows.flat(rows.score_rows) - 0.1 * rows.random("divergence")
    config = importlib.import_module("verl.trainer.config").AlgoConfig(gamma=gamma)
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(rows.pad(batch.rewards), rows.mask, config=config)
    assert_close(ReinforcePlusPlus(gamma=gamma).token_advantages(batch)[0], as_ours(rows.flat(theirs)))


@SEEDS
def test_reinforce_plus_plus_baseline_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    theirs = outcome_advantages(verl.compute_reinforce_plus_plus_baseline_outcome_advantage, rows)
    assert_close(by_group(ReinforcePlusPlusBaseline(), rows), as_ours(theirs))


@SEEDS
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_agrees_with_verl(verl: ModuleType, rows: Rows, gamma: float, gae_lambda: float) -> None:
    batch = rows.batch()
    batch.rewards = rows.random("rewards")
    theirs, returns = verl.compute_gae_advantage_return(
        rows.pad(batch.rewards), rows.pad(batch.values), rows.mask, gamma, gae_lambda
    )
    ours = PPO(gamma=gamma, gae_lambda=gae_lambda).token_advantages(batch)
    assert_close(ours[0], as_ours(rows.flat(theirs)))
    assert_close(ours[1], rows.flat(returns))


def assert_same_loss(ours: Tensor, theirs: Tensor, logprobs: Tensor) -> None:
    """Check for the same number, with the same gradient."""
    (slope,) = torch.autograd.grad(ours, logprobs)
    (their_slope,) = torch.autograd.grad(theirs, logprobs)
    assert_close(ours, theirs)
    assert_close(slope, their_slope)
    assert slope.any()


AGGREGATIONS: list[tuple[Aggregation, str]] = [
    ("token-mean", "token-mean"),
    ("seq-mean-token-mean", "seq-mean-token-mean"),
    ("seq-mean-token-sum", "seq-mean-token-sum"),
    ("fixed-length", "seq-mean-token-sum-norm"),
]


@SEEDS
@pytest.mark.parametrize(("ours", "theirs"), AGGREGATIONS)
def test_aggregations_agree_with_verl(verl: ModuleType, rows: Rows, ours: Aggregation, theirs: str) -> None:
    losses = rows.random("losses")
    weights = rows.batch().with_weights(ours, 16 if ours == "fixed-length" else None).weights
    expected = verl.agg_loss(rows.pad(losses), rows.mask, theirs, loss_scale_factor=16)
    assert_close((losses * weights).sum(), expected)


LOSSES = [
    ("vanilla", PPO(clip_low=0.1, clip_high=0.3, dual_clip=1.5), 0.6),
    ("gspo", GSPO(clip_low=0.05, clip_high=0.1), 0.4),
    ("cispo", CISPO(clip_low=0.1, clip_high=0.3), 0.6),
    ("sapo", SAPO(positive_temperature=1.0, negative_temperature=1.05), 0.6),
    ("dppo_tv", DPPO(clip_low=0.03, clip_high=0.05, ratio_cap=1.5), 0.6),
    ("dppo_kl", DPPO(divergence="kl", clip_low=0.005, clip_high=0.01, ratio_cap=1.5), 0.6),
]


@SEEDS
@pytest.mark.parametrize(("name", "algorithm", "by"), LOSSES, ids=[name for name, _, _ in LOSSES])
def test_policy_losses_agree_with_verl(
    verl: ModuleType, rows: Rows, name: str, algorithm: Algorithm, by: float
) -> None:
    batch = rows.batch().with_weights(algorithm.aggregation)
    batch.sampler_logprobs = batch.old_logprobs
    logprobs = rows.moved(batch, by)
    config = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        clip_ratio_c=getattr(algorithm, "ratio_cap", algorithm.dual_clip or 3.0),
    )
    theirs, metrics = verl.get_policy_loss_fn(name)(
        rows.pad(batch.old_logprobs),
        rows.pad(logprobs),
        rows.pad(batch.advantages),
        rows.mask,
        algorithm.aggregation,
        config,
    )
    ours, sums = algorithm.loss(logprobs, batch)
    assert_same_loss(ours, theirs, logprobs)
    clipped = metrics["actor/pg_clipfrac"]
    if name == "vanilla":  # which counts the two ends of the range, and the bound of bad tokens, separately
        clipped += metrics["actor/pg_clipfrac_lower"]
    if name != "sapo":  # which clips nothing
        assert sums["policy/clip_fraction"].item() / batch.num_tokens == pytest.approx(clipped, abs=1e-6)


@SEEDS
def test_critic_loss_agrees_with_verl(verl: ModuleType, rows: Rows) -> None:
    batch = rows.batch()
    values = (batch.values + rows.random("values moved")).requires_grad_()
    theirs, clipped = verl.compute_value_loss(
        rows.pad(values), rows.pad(batch.returns), rows.pad(batch.values), rows.mask, 0.2
    )
    ours, sums = PPO(value_coef=1.0, value_clip=0.2).value_loss(values, batch)
    assert_same_loss(ours, theirs, values)
    assert sums["critic/clip_fraction"].item() / batch.num_tokens == pytest.approx(clipped.item())


@SEEDS
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences_agree_with_verl(verl: ModuleType, rows: Rows, estimator: KLEstimator) -> None:
    """Our gradient is always that of k2, which verl gives to the estimators whose names end in +."""
    batch = rows.batch()
    logprobs = rows.moved(batch)
    ours = kl_divergence(logprobs, batch.ref_logprobs, estimator)
    assert_close(ours, verl.kl_penalty(logprobs, batch.ref_logprobs, estimator))
    assert_same_loss(ours.sum(), verl.kl_penalty(logprobs, batch.ref_logprobs, f"{estimator}+").sum(), logprobs)


@SEEDS
def test_importance_weights_agree_with_verl(rows: Rows) -> None:
    """Of tokens the same; of sequences ours are the geometric mean of the tokens' ratios, and theirs their product."""
    compute = importlib.import_module("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights
    batch = rows.batch()
    assert batch.old_logprobs is not None
    sampler = batch.old_logprobs + rows.random("sampler", -1.0, 1.0)
    gap = batch.old_logprobs - sampler

    def ours(level: Any, cap: float, mode: Any = "truncate", floor: float | None = None) -> Tensor:
        arguments = (batch.old_logprobs, sampler, batch.sequence_of)
        return importance_weights(*arguments, level=level, cap=cap, floor=floor, mode=mode)

    def theirs(level: str, bounds: float | str) -> Tensor:
        return rows.flat(compute(rows.pad(gap), rows.mask, level, bounds)[0])

    assert_close(ours("token", 1.5), theirs("token", 1.5))
    assert_close(ours("token", 2.0, "mask", 0.6), theirs("token", "0.6_2.0"))  # IcePop
    lengths = torch.bincount(batch.sequence_of)[batch.sequence_of]
    assert_close(ours("sequence", 1e3) ** lengths, theirs("sequence", 1e9))
