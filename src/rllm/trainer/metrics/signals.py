"""Signs that a run learns nothing or goes wrong, told by name in the step in which they appear."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from rllm.errors import all_of
from rllm.parser.chat_template import lost_warning
from rllm.types import LOST_KEY, Episode

logger = logging.getLogger(__name__)

MAX_RATIO = 2.0
"""Mean probability ratio above which updates run far away from what was sampled."""
MAX_UPDATE_KL = 1.0
"""Nats a token that updates of one batch may move the policy; where most of what was sampled becomes impossible, the mean
ratio falls."""
MIN_ENTROPY = 0.02
"""Nats a token below which the policy hardly ever tries anything else."""
MAX_SAMPLER_GAP = 0.05
"""Mean difference of log-probabilities between sampler and trainer; float32 gives about 1e-6, bfloat16 about 1e-2."""


_OTHER_TASKS = (
    "use tasks that are neither too hard nor too easy, raise rollout.group_size, or set or raise "
    "rollout.resample_rounds"
)


def signals(metrics: Mapping[str, float], episodes: Sequence[Episode]) -> dict[str, str]:
    """Names of what is wrong, and a sentence with the values seen and the remedy for each.

    Args:
        metrics: of one training step.
        episodes: the step's.
    """

    def of(name: str) -> float:
        return metrics.get(name, math.nan)  # comparisons with NaN are false: what is not known is not wrong

    # Where nothing is trained on there is no forward pass; what was sampled then tells the entropy, less exactly.
    entropy = metrics.get("policy/entropy", of("rollout/entropy"))
    hardly_differ = of("batch/zero_variance") > 0.5 or of("rollout/reward_p10") == of("rollout/reward_p90")
    num_reward_errors = sum(episode.failed and episode.info["error"]["type"] == "RewardError" for episode in episodes)
    unscored = _unscored_roles(episodes)
    lost = sorted({kind for episode in episodes for kind in episode.info.get(LOST_KEY, ())})
    found = {
        "no_variance": (
            of("batch/zero_variance") == 1.0,
            f"{all_of(int(metrics.get('batch/num_groups', 0)), 'group')} earned the same throughout, so rewards teach nothing: "
            + (" ".join(f"{lost_warning(kind)}." for kind in lost) or _OTHER_TASKS),
        ),
        "all_dropped": (
            of("batch/num_sequences") == 0.0 and of("batch/zero_variance") != 1.0,
            f"nothing of this step is trained on ({_reasons(metrics)}): see whether tasks are too hard or too easy, what "
            "filters leave out, whether any role learns, and whether all rollouts of a task give trajectories the same names",
        ),
        "all_truncated": (
            of("rollout/truncated") == 1.0,
            "every answer was cut off at its maximal length: raise rollout.max_tokens, or see why the model never ends",
        ),
        "rewards_raise": (
            num_reward_errors > len(episodes) / 2,
            f"the reward of {num_reward_errors} of {len(episodes)} rollouts raised, so they count for nothing: see the "
            "warnings above for its name",
        ),
        "unscored_role": (
            of("dropped/unscored") > 0.0 and bool(unscored),
            f"no trajectory of {' and '.join(unscored)} has a reward, so nothing is learned of what was done there: set one "
            "on each, or roles.NAME.trainable=false if that is meant",
        ),
        "ratio_overflow": (
            of("policy/ratio") > MAX_RATIO or of("policy/update_kl") > MAX_UPDATE_KL,
            f"the mean probability ratio is {of('policy/ratio'):.3g}, and the updates of the batch moved the policy by "
            f"{of('policy/update_kl'):.3g} nats a token: lower optim.lr, optim.num_epochs or num_minibatches",
        ),
        "entropy_collapse": (
            entropy < MIN_ENTROPY and hardly_differ and of("rollout/accuracy") < 0.9,
            f"the entropy is {entropy:.3g} nats a token and rewards hardly differ: lower optim.lr, set "
            "algorithm.entropy_coef, or hold the policy to its reference with algorithm.kl_coef",
        ),
        "sampler_disagrees": (
            of("policy/sampler_gap_mean") > MAX_SAMPLER_GAP,
            f"sampler and trainer differ by {of('policy/sampler_gap_mean'):.3g} nats a token: {_remedy(metrics)}",
        ),
    }
    return {name: told for name, (is_so, told) in found.items() if is_so}


def _unscored_roles(episodes: Sequence[Episode]) -> list[str]:
    """The names of trajectories none of which has a reward, in rollouts in which others have one."""
    paths = [path for episode in episodes if not episode.failed for path in episode.trajectories if path.trainable]
    scored = {path.name for path in paths if path.final_reward() is not None}
    return sorted({repr(path.name) for path in paths if scored and path.name not in scored})


def _reasons(metrics: Mapping[str, float]) -> str:
    """Why trajectories were left out, the most frequent reason first."""
    counts = {name: value for name, value in metrics.items() if name.startswith("dropped/")}
    told = [f"{counts[name]:.0f} x {name}" for name in sorted(counts, key=counts.__getitem__, reverse=True)]
    return ", ".join(told) or "all advantages are 0"


def _remedy(metrics: Mapping[str, float]) -> str:
    """What to do about a sampler that differs from the trainer, where it is not done yet."""
    remedies = [] if "policy/correction" in metrics else ["set algorithm.correction=truncate"]
    age = metrics.get("tokens/staleness_max", 0.0)
    if age > 0:
        remedies.append(f"lower optim.lr or rollout.max_staleness, since answers are up to {age:.0f} updates old")
    else:
        remedies.append("see whether the sampler changes its distribution or has old weights")
    return ", or ".join(remedies)


class Watch:
    """Logs each sign when it appears, and not again while it lasts."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()

    def look(self, step: int, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> dict[str, float]:
        """Warn of what is new; returns `signal/<name>` of 1 for everything that is wrong now."""
        found = signals(metrics, episodes)
        for name, told in found.items():
            if name not in self._lasting:
                logger.warning("step %d, %s: %s", step, name, told)
        self._lasting = set(found)
        return {f"signal/{name}": 1.0 for name in found}
