"""Warnings of a run that learns nothing or diverges, in the step in which the signs appear."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from rllm.errors import all_of
from rllm.parser.chat_template import lost_warning
from rllm.types import LOST_KEY, Episode, JSONMapping, JSONObject

logger = logging.getLogger(__name__)


_COMPARED = ("policy/entropy", "rollout/entropy", "rollout/reward", "batch/zero_variance")
"""Metrics that are compared with their values in earlier steps."""

MAX_RATIO = 2.0
"""Mean probability ratio above which updates have moved the policy far from what was sampled."""
MAX_UPDATE_KL = 1.0
"""Nats per token by which the updates of one batch may move the policy. If most samples become impossible, the mean
ratio falls instead."""
MIN_ENTROPY = 0.02
"""Entropy in nats per token below which the policy hardly explores."""
MAX_CUT_OFF = 0.2
"""Share of the answers that may be cut off at their maximum length."""
QUICK_STEPS, QUICK_FALL, MANY_CHOICES = 20, 5.0, 1.0
"""A policy no longer explores, whatever its reward does, if its entropy was at least MANY_CHOICES nats per token and
falls by a factor of QUICK_FALL within QUICK_STEPS steps."""
FALL = 10.0
"""Factor by which the entropy may fall below the first steps' entropy, at any speed, while the reward does not rise."""
GOOD = 0.9
"""Accuracy from which a policy may be sure of itself."""
LEAST_RISE = 0.05
"""Smallest rise of the reward that counts, relative to the first reward, or to 1 if that is smaller."""
_AROUND = 3
"""Number of steps over which the reward at the beginning, and now, is averaged."""
_QUIET_STEPS = 10
"""Steps without a sign before it is logged again: the metrics of single steps often cross their bounds."""
MAX_SAMPLER_GAP = 0.05
"""Mean difference of log-probabilities between sampler and trainer; float32 gives about 1e-6, bfloat16 about 1e-2."""


_OTHER_TASKS = (
    "use tasks that are neither too hard nor too easy, raise rollout.group_size, or set or raise "
    "rollout.resample_rounds"
)


def signals(
    metrics: Mapping[str, float], episodes: Sequence[Episode], before: Sequence[Mapping[str, float]] = ()
) -> dict[str, str]:
    """Return the signs of this step by name, each with a sentence on the values seen and the remedy.

    Args:
        metrics: of one training step.
        episodes: the step's.
        before: the metrics of the steps before it, as far as they are known.
    """

    def of(name: str) -> float:
        return metrics.get(name, math.nan)  # comparisons with NaN are false: what is not known is not wrong

    steps = [*before, metrics]
    # If all is solved, single steps have nothing to teach; tasks are too easy if it lasts.
    solved_for_long = len(steps) == 1 or all(step.get("batch/zero_variance") == 1.0 for step in steps[-_AROUND:])
    num_reward_errors = sum(episode.failed and episode.info["error"]["type"] == "RewardError" for episode in episodes)
    unscored = _unscored_roles(episodes)
    lost = sorted({kind for episode in episodes for kind in episode.info.get(LOST_KEY, ())})
    found = {
        "no_variance": (
            of("batch/zero_variance") == 1.0 and (solved_for_long or of("rollout/accuracy") != 1.0),
            f"{all_of(int(metrics.get('batch/num_groups', 0)), 'group')} gave the same reward to all rollouts, which "
            "teaches nothing: " + (" ".join(f"{lost_warning(kind)}." for kind in lost) or _OTHER_TASKS),
        ),
        "all_dropped": (
            of("batch/num_sequences") == 0.0 and of("batch/zero_variance") != 1.0,
            f"nothing of this step is trained on ({_reasons(metrics)}): check whether tasks are too hard or too easy, "
            "what filters exclude, whether any role is trainable, and whether all rollouts of a task give their "
            "trajectories the same names",
        ),
        "all_truncated": (
            of("rollout/truncated") == 1.0,
            "every answer was cut off at its maximum length: raise rollout.max_tokens and the agent's own "
            "max_tokens (the lower one applies), or find out why the model does not end its answers",
        ),
        "many_truncated": (
            MAX_CUT_OFF <= of("rollout/truncated") < 1.0,
            f"{of('rollout/truncated'):.0%} of the answers were cut off at their maximum length and are scored as they "
            "are: raise rollout.max_tokens and the agent's own max_tokens (the lower one applies)",
        ),
        "rewards_raise": (
            num_reward_errors > len(episodes) / 2,
            f"the reward function raised an error for {num_reward_errors} of {len(episodes)} rollouts, which are not "
            "trained on: see the warnings above",
        ),
        "unscored_role": (
            of("dropped/unscored") > 0.0 and bool(unscored),
            f"no trajectory named {' or '.join(unscored)} has a reward, so nothing is learned from them: set "
            "one on each, or roles.NAME.trainable=false if that is intended",
        ),
        "ratio_overflow": (
            of("policy/ratio") > MAX_RATIO or of("policy/update_kl") > MAX_UPDATE_KL,
            f"the mean probability ratio is {of('policy/ratio'):.3g}, and the updates of the batch moved the policy by "
            f"{of('policy/update_kl'):.3g} nats a token: lower optim.lr, optim.num_epochs or optim.num_minibatches",
        ),
        "entropy_collapse": (
            bool(collapse := _collapse(steps)),
            f"{collapse}: lower optim.lr, set algorithm.entropy_coef, or hold the policy to its reference with "
            "algorithm.kl_coef",
        ),
        "sampler_disagrees": (
            of("policy/sampler_gap_mean") > MAX_SAMPLER_GAP,
            f"sampler and trainer differ by {of('policy/sampler_gap_mean'):.3g} nats a token: {_remedy(metrics)}",
        ),
    }
    return {name: message for name, (is_so, message) in found.items() if is_so}


def _collapse(steps: Sequence[Mapping[str, float]]) -> str:
    """Return how the policy stopped exploring by the last step; empty if it did not, or is good enough."""
    # If nothing was trained on, the entropy of the samples, which is less exact.
    entropies = [step.get("policy/entropy", step.get("rollout/entropy", math.nan)) for step in steps]
    now, last = entropies[-1], steps[-1]
    if not last.get("rollout/accuracy", math.nan) < GOOD or math.isnan(now):
        return ""
    differs_little = last.get("batch/zero_variance", 0.0) > 0.5
    has_no_spread = last.get("rollout/reward_p10", math.nan) == last.get("rollout/reward_p90", math.nan)
    if now < MIN_ENTROPY and (differs_little or has_no_spread):
        return f"the entropy is {now:.3g} nats a token and rewards hardly differ"
    known = [value for value in entropies if not math.isnan(value)]
    if len(known) < _AROUND or "policy/teacher_kl" in last:  # a teacher's entropy is what the policy is to have
        return ""
    now = max(known[-2:])  # A single step may be of other tasks.
    recent, first = sorted(known[-QUICK_STEPS:])[-2], sorted(known[:_AROUND])[-2]  # the highest may be an outlier
    if recent >= MANY_CHOICES and now < recent / QUICK_FALL:
        return (
            f"the entropy fell from {recent:.3g} to {known[-1]:.3g} nats a token within "
            f"{min(len(known), QUICK_STEPS)} steps"
        )
    if now < first / FALL and not _has_risen(steps):
        return f"the entropy fell from {first:.3g} to {known[-1]:.3g} nats a token, and the reward did not rise"
    return ""


def _has_risen(steps: Sequence[Mapping[str, float]]) -> bool:
    rewards = [step["rollout/reward"] for step in steps if "rollout/reward" in step]
    if len(rewards) <= _AROUND:
        return False
    first, now = fmean(rewards[:_AROUND]), fmean(rewards[-_AROUND:])
    return now - first > LEAST_RISE * max(1.0, abs(first))


def _unscored_roles(episodes: Sequence[Episode]) -> list[str]:
    """Return the names of trajectories that never have a reward in rollouts in which others do."""
    paths = [path for episode in episodes if not episode.failed for path in episode.trajectories if path.trainable]
    scored = {path.name for path in paths if path.final_reward() is not None}
    return sorted({repr(path.name) for path in paths if scored and path.name not in scored})


def _reasons(metrics: Mapping[str, float]) -> str:
    counts = {name: value for name, value in metrics.items() if name.startswith("dropped/")}
    parts = [f"{counts[name]:.0f} x {name}" for name in sorted(counts, key=counts.__getitem__, reverse=True)]
    return ", ".join(parts) or "all advantages are 0"


def _remedy(metrics: Mapping[str, float]) -> str:
    """Return remedies for a sampler that differs from the trainer, except those in use."""
    remedies = [] if "policy/correction" in metrics else ["set algorithm.correction=truncate"]
    age = metrics.get("tokens/staleness_max", 0.0)
    if age > 0:
        remedies.append(
            f"lower optim.lr, rollout.max_staleness or data.replay_steps, since answers are up to {age:.0f} updates old"
        )
    else:
        remedies.append("see whether the sampler changes its distribution or has old weights")
    return ", or ".join(remedies)


class RunHealth:
    """Logs each sign when it appears, and again only after it was absent for `_QUIET_STEPS`."""

    def __init__(self, state: JSONMapping | None = None) -> None:
        """Begin, or continue with the `state` of a checkpoint."""
        state = state or {}
        self._last_seen: dict[str, int] = dict(state.get("last_seen", {}))
        self._before: list[dict[str, float]] = list(state.get("before", ()))

    @property
    def state(self) -> JSONObject:
        """Metrics and signs of the steps so far, as JSON for a checkpoint."""
        return {"last_seen": dict(self._last_seen), "before": list(self._before)}

    def check(self, step: int, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> dict[str, float]:
        """Warn of new signs, and return `signal/<name>` as 1 for each sign of this step."""
        found = signals(metrics, episodes, self._before)
        for name, sentence in found.items():
            if step - self._last_seen.get(name, -math.inf) > _QUIET_STEPS:
                logger.warning("step %d, %s: %s", step, name, sentence)
            self._last_seen[name] = step
        self._before.append({name: metrics[name] for name in _COMPARED if name in metrics})
        return {f"signal/{name}": 1.0 for name in found}
