"""Base class of algorithms: a credit for each trajectory of a group, and a loss over tokens.

An algorithm is one class: it defines `credit` (or `credits`, to compare across groups), or `token_advantages` to
credit single tokens, and may replace `surrogate`, the part of the loss that moves the policy. The options below belong
to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import mean
from typing import ClassVar, Literal

from torch import Tensor

from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.losses import (
    KLEstimator,
    clipped_policy_loss,
    importance_weights,
    kl_divergence,
    pull_of_teacher,
)
from rllm.errors import ConfigError
from rllm.types import JSONMapping, JSONObject, Trajectory, TrajectoryGroup

Sums = dict[str, Tensor]
"""Sums over tokens by the name of the metric."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A policy-gradient algorithm; its fields are its configuration."""

    min_group_size: ClassVar[int] = 1
    """Smallest number of rollouts of a task that it compares."""
    compares_rollouts: ClassVar[bool] = True
    """Equal rewards of all rollouts of a task teach nothing. False if other tasks contribute to the baseline."""
    needs_values: ClassVar[bool] = False
    """Needs a critic that estimates the value of each token."""
    needs_energies: ClassVar[bool] = False
    """Needs the squared norm of the gradient of each token by its logits: `Batch.energies`."""
    needs_greedy: ClassVar[bool] = False
    """Needs one more rollout per task, at temperature 0 and not trained on: `TrajectoryGroup.references`."""
    masks_minibatches: ClassVar[bool] = False
    """Chooses tokens in `masked` before each update, which costs a forward pass."""
    needs_rewards: ClassVar[bool] = True
    """Cannot learn from unscored trajectories."""
    demonstrated: ClassVar[bool] = False
    """Trains on demonstrations, not on samples of the policy, so there is no sampler to compare with."""
    is_own_teacher: ClassVar[bool] = False
    """Its teacher is the policy itself, given a demonstration."""
    of_sampler: ClassVar[bool] = False
    """Takes ratios to the probabilities that tokens were sampled with, so that older weights need no correction."""

    usual_kl_estimator: ClassVar[KLEstimator] = "k3"
    """Estimator of the divergence in the loss if `kl_estimator` is not set."""

    clip_low: float = 0.2
    """Distance below 1 that a token's probability ratio may fall before its gradient stops."""
    clip_high: float = 0.2
    """Distance above 1 to which the ratio may rise."""
    dual_clip: float | None = None
    """Bound on the ratio of tokens with a negative advantage, above which their gradient stops; 3 is usual. None sets
    no bound."""
    aggregation: Aggregation = "token-mean"
    """Mean that the loss takes: over tokens, trajectories' means, sequences' means, sequences' sums, or sums over a
    fixed length. A rollout whose history is compacted has several sequences: `trajectory-mean-token-mean` weighs it as
    one, however many these are."""
    fixed_length: int | None = None
    """Tokens that each sequence's sum is divided by under aggregation=fixed-length, such as rollout.max_tokens."""
    level: Literal["trajectory", "step"] = "trajectory"
    """Unit of comparison within a group: trajectory compares whole trajectories; step compares their first steps
    with each other, their second ones, and so on, by the discounted return of each step."""
    step_coef: float = 0.0
    """Weight of a second comparison, added to the advantage of the trajectory: each step is compared with the steps of
    the group that had the same observation, by their discounted returns; see gigpo."""
    gamma: float = 1.0
    """Discount of later rewards, where steps (level=step, step_coef) or tokens (ppo, reinforce_plus_plus) are
    credited."""
    kl_coef: float = 0.0
    """Strength of the penalty for diverging from the reference, the model that the run began with."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place where the divergence is subtracted: the loss, token by token, or the reward, before it is credited."""
    kl_estimator: KLEstimator | None = None
    """Estimator of the divergence from the sampled token. In the loss all have the right gradient, and k3 is usual;
    in the reward only k1 has, and is the default: near the reference the others hardly pull."""
    entropy_coef: float = 0.0
    """Strength of the bonus for the policy's entropy."""
    teacher_coef: float = 0.0
    """Advantage added to each token for every nat by which the teacher finds it likelier than the policy: on-policy
    distillation, in addition to any other credit."""
    observation_coef: float = 0.0
    """Strength of the cross-entropy of what the environment answered to the policy, such as results of tools; see
    `rllm.algorithms.echo`."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Treatment of a sampler whose probabilities differ from the trainer's: weigh tokens by their bounded ratio, or
    also mask those out of bounds."""
    correction_level: Literal["token", "sequence"] = "token"
    """Ratio of single tokens, or the geometric mean over their sequence."""
    correction_cap: float = 2.0
    """Upper bound of the ratio."""
    correction_floor: float | None = None
    """Lower bound of the ratio. None is 1 / correction_cap for mask, and no bound for truncate. IcePop (Ling Team 2025)
    masks below 0.5 and above 5."""

    def __post_init__(self) -> None:
        self._require("clip_low", 0 < self.clip_low <= 1, "use a number above 0, up to 1, such as 0.2")
        self._require("clip_high", self.clip_high > 0, "use a number above 0, such as 0.2")
        self._require(
            "dual_clip",
            self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
            "use a number above 1 + algorithm.clip_high, such as 3",
        )
        self._require("gamma", 0 < self.gamma <= 1, "use a number above 0, up to 1")
        self._require("kl_coef", 0 <= self.kl_coef < math.inf, "use 0 (off) or a number above it")
        self._require(
            "kl_in",
            self.kl_in == "loss" or self.kl_coef > 0,
            "nothing is subtracted with algorithm.kl_coef=0; set that above 0",
        )
        self._require("entropy_coef", math.isfinite(self.entropy_coef), "use 0 (off) or a number such as 0.01")
        self._require("teacher_coef", 0 <= self.teacher_coef < math.inf, "use 0 (off) or a number above it")
        self._require("observation_coef", 0 <= self.observation_coef < math.inf, "use 0 (off) or a number above it")
        self._require("correction_cap", self.correction_cap >= 1, "use at least 1")
        self._require(
            "correction_floor",
            self.correction_floor is None or 0 <= self.correction_floor <= 1,
            "use a number from 0 to 1, such as 0.5",
        )
        self._require(
            "level",
            self.level == "trajectory" or not self.credits_tokens,
            "this algorithm credits single tokens; use trajectory",
        )
        self._require("step_coef", 0 <= self.step_coef < math.inf, "use 0 (off) or a number above it, such as 1")
        self._require(
            "step_coef",
            not self.step_coef or (self.min_group_size > 1 and self.level == "trajectory" and not self.credits_tokens),
            "it adds to a comparison of whole trajectories; use algorithm.level=trajectory and an algorithm that "
            "compares rollouts, such as gigpo",
        )
        credits_steps = self.level == "step" or self.step_coef > 0 or self.credits_tokens
        self._refuse_details("level=step or algorithm.step_coef", credits_steps, "gamma")
        self._refuse_details("kl_coef", self.needs_reference, "kl_estimator")
        of_correction = "correction_level", "correction_cap", "correction_floor"
        self._refuse_details("correction", self.correction != "none", *of_correction)
        if self.of_sampler:
            self._refuse("the ratio to the sampler is part of this algorithm; leave it out", "correction")
        if self.aggregation == "fixed-length":
            given = self.fixed_length is not None and self.fixed_length > 0
            self._require(
                "fixed_length",
                given,
                "algorithm.aggregation=fixed-length divides by it; use the value of rollout.max_tokens",
            )
        else:
            unset = self.fixed_length is None
            self._require("fixed_length", unset, "only algorithm.aggregation=fixed-length uses it; leave it out")

    def _refuse_details(self, switch: str, is_on: bool, *details: str) -> None:
        """Refuse settings of a feature that is off, since setting them suggests that it is meant to be on."""
        if not is_on:
            self._refuse(f"it has no effect without algorithm.{switch}; set that, too", *details)

    def _refuse(self, remedy: str, *names: str) -> None:
        """Refuse settings that differ from the default of this algorithm."""
        for item in fields(self):
            if item.name in names:
                self._require(item.name, getattr(self, item.name) == item.default, remedy)

    def _require(self, name: str, holds: bool, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"algorithm.{name}={getattr(self, name)!r}: {remedy}")

    def settings(self) -> JSONObject:
        """Return the fields by name, with the values in effect for those that are not set."""
        return {**asdict(self), "kl_estimator": self.divergence_estimator}

    @property
    def divergence_estimator(self) -> KLEstimator:
        """Estimator of the divergence in effect."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else self.usual_kl_estimator)

    @property
    def needs_reference(self) -> bool:
        """Return whether the reference's log-probabilities are needed."""
        return self.kl_coef > 0

    @property
    def needs_original(self) -> bool:
        """Return whether the weights that the run began with are needed, as a reference or a teacher."""
        return self.needs_reference

    @property
    def needs_teacher(self) -> bool:
        """Return whether the teacher's log-probabilities are needed."""
        return self.teacher_coef > 0

    @property
    def credits_tokens(self) -> bool:
        """Return whether `token_advantages` credits single tokens, rather than `credit` trajectories; critics do so."""
        return self.needs_values

    @property
    def penalizes_divergence(self) -> bool:
        """Return whether the divergence from the reference is subtracted from rewards, before they are credited."""
        return self.needs_reference and self.kl_in == "reward"

    @property
    def needs_scores(self) -> bool:
        """Return whether the batch must be scored before rewards become advantages."""
        return self.needs_values or self.needs_energies or self.penalizes_divergence

    @property
    def learns_without_advantage(self) -> bool:
        """Return whether tokens without advantage still move weights.

        Those are the critic's weights, or the policy's through its entropy, its divergence, its teacher or what it
        observed.
        """
        if self.observation_coef:
            return True
        regularized = self.entropy_coef != 0 or (self.needs_reference and self.kl_in == "loss")
        return self.needs_values or self.needs_teacher or regularized

    def credits(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """Return the advantages of all groups of a batch; override to compare across groups."""
        return [self.credit(group) for group in groups]

    def credit(self, group: TrajectoryGroup) -> list[float]:
        """Return the advantage of each trajectory of a group, in order."""
        raise NotImplementedError(f"{type(self).__name__} must define credit(group)")

    def compared(self, trajectory: Trajectory) -> Hashable:
        """Return the value that must differ within a group for it to teach anything: the reward."""
        return trajectory.final_reward()

    def baseline(self, group: TrajectoryGroup) -> float | None:
        """Return the value that the rewards of a group were compared with, for the records."""
        return None

    def state(self) -> JSONObject:
        """Return the state that later batches depend on, as JSON for the checkpoint; `{}` if none."""
        return {}

    def restore(self, state: JSONMapping) -> None:
        """Continue from a `state`; `{}` is the one before the first batch."""

    def token_advantages(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return advantages [N], and for a critic the returns [N] that it should have estimated.

        Args:
            batch: its `rewards` lie on the last token of each step, less every token's divergence where that is taken
                off the reward; with a critic it has `values`. The tokens of a trajectory (`trajectory_of`) lie
                together, in the order in which they were chosen.
        """
        raise NotImplementedError(f"{type(self).__name__} must define token_advantages(batch)")

    def value_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the critic's loss of a batch or a part of it, weighted like the policy's, and sums over its tokens.

        Args:
            values: [N] the critic's estimates now, with gradient.
            batch: its `values` are the estimates before the update, its `returns` the targets.
        """
        raise NotImplementedError(f"{type(self).__name__} must define value_loss(values, batch)")

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the policy's loss of each token [N], and sums of interest. Default: PPO's clipped surrogate."""
        losses, ratio, clipped = clipped_policy_loss(
            logprobs,
            old_logprobs,
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return losses, {"policy/clip_fraction": clipped.float().sum(), "policy/ratio": ratio.detach().sum()}

    def masked(self, batch: Batch, logprobs: Tensor) -> tuple[Batch, Sums]:
        """Return a minibatch without the advantages of the tokens that its update should leave out, and sums.

        Args:
            batch: all of the minibatch.
            logprobs: [N] the policy's before the update.
        """
        raise NotImplementedError(f"{type(self).__name__} must define masked(batch, logprobs)")

    def correction_weights(self, old: Tensor, batch: Batch) -> Tensor:
        """Return [N] the weights that correct for tokens whose `old` [N] differs from their sampler's."""
        assert self.correction != "none"
        assert batch.sampler_logprobs is not None, "demonstrations are not corrected for"
        return importance_weights(
            old,
            batch.sampler_logprobs,
            batch.sequence_of,
            level=self.correction_level,
            cap=self.correction_cap,
            floor=self.correction_floor,
            mode=self.correction,
        )

    def loss(self, logprobs: Tensor, batch: Batch, entropy: Tensor | None = None) -> tuple[Tensor, Sums]:
        """Return the loss of (a part of) a batch, and sums of interest over its tokens.

        Args:
            logprobs: [N], with gradient.
            batch: what they are the log-probabilities of. `old_logprobs` of `None` means that this is the first update
                on the batch, so that they equal `logprobs`.
            entropy: [N] of the distributions that the tokens were drawn from, with gradient; needed for `entropy_coef`.
        """
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        if self.of_sampler:
            assert batch.sampler_logprobs is not None, "ratios are taken of what was sampled"
            old = batch.sampler_logprobs
        losses, sums = self.surrogate(logprobs, old, batch)
        sums["policy/update_kl"] = kl_divergence(old, logprobs.detach(), "k3").sum()
        if self.correction != "none":
            weights = self.correction_weights(old, batch)
            losses = losses * weights
            sums["policy/correction"] = weights.sum()
        if batch.teacher_logprobs is not None:
            sums["policy/teacher_kl"] = -pull_of_teacher(old, batch.teacher_logprobs).sum()
        if self.needs_reference:
            assert batch.ref_logprobs is not None, "the batch was scored with the reference"
            divergence = kl_divergence(logprobs, batch.ref_logprobs, self.divergence_estimator)
            sums["policy/kl"] = divergence.detach().sum()
            if self.kl_in == "loss":
                losses = losses + self.kl_coef * divergence
        if self.entropy_coef:
            assert entropy is not None, "the forward pass gave entropies"
            losses = losses - self.entropy_coef * entropy
        return (losses * batch.weights).sum(), sums


@dataclass(frozen=True, kw_only=True)
class ComparedRollouts(Algorithm):
    """Base of algorithms whose advantages are rewards less a baseline: the mean of the group unless overridden."""

    min_group_size: ClassVar[int] = 2

    def credit(self, group: TrajectoryGroup) -> list[float]:
        baseline = self.baseline(group)  # an exact mean, so that equal rewards give zeros and not rounding errors
        return [reward - baseline for reward in group.rewards]

    def baseline(self, group: TrajectoryGroup) -> float:
        return mean(group.rewards)
