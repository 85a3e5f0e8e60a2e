"""Metrics of episodes and batches, and which episodes can be used.

Failed rollouts are counted by reason, and accuracy includes them as wrong; unscored ones are counted, and are not part
of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

import torch

from rllm._runtime.process import peak_memory
from rllm.compat.metric_names import known_eval_metrics, known_training_metrics
from rllm.config.sizes import GB
from rllm.engine.episode_log import plain_task_id
from rllm.engine.failures import count_reasons, why_failed, why_unscored
from rllm.errors import AgentError, EnvError, RewardError, RolloutError, all_of
from rllm.trainer.credit import Assembled
from rllm.types import SOURCE_KEY, Episode, Step, StepCredit, Trajectory, grouped, token_versions


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `rollout/...` for the episodes of a training step."""
    rewards = rewards_of(episodes)
    steps = [step for episode in episodes for path in episode.trajectories for step in path.steps]
    lengths = [len(step.response_ids) for step in steps if step.response_ids]
    endings = Counter(episode.termination_reason.value for episode in episodes if episode.termination_reason)
    return {
        **_reported(episodes),  # first, so that an agent's metric never replaces a measured one
        **_mean("rollout/reward", rewards),
        **_spread("rollout/reward", rewards),
        **_by_role("rollout/reward", episodes),
        **_by_source(episodes),
        **_by_part("rollout/part", episodes),
        **_mean("rollout/accuracy", _verdicts(episodes)),
        **_mean("rollout/response_tokens", lengths),
        **_mean("rollout/entropy", [-logprob for step in steps for logprob in step.logprobs]),
        "rollout/calls_per_episode": len(steps) / max(len(episodes), 1),
        "rollout/truncated": _cut_off(steps),
        **{f"rollout/ended_by/{reason}": count / len(episodes) for reason, count in sorted(endings.items())},
        "rollout/num_failed": float(sum(episode.failed for episode in episodes)),
        "rollout/num_unscored": float(sum(reward is None for reward in _final_rewards(episodes))),
    }


def batch_metrics(assembled: Assembled) -> dict[str, float]:
    """Return `batch/...`: the content of the batch, and what was dropped."""
    return {
        "batch/num_sequences": float(len(assembled.batch)),
        "batch/num_groups": float(assembled.num_groups),
        "batch/zero_variance": assembled.num_uniform_groups / max(assembled.num_groups, 1),
        **_mean("batch/advantage", assembled.advantages),
        **_spread("batch/advantage", assembled.advantages),
        "tokens/drift": assembled.num_forks / max(assembled.num_steps, 1),
        **{f"tokens/drift/{reason}": count / assembled.num_steps for reason, count in assembled.drifts.items()},
        **{f"dropped/{reason}": float(count) for reason, count in assembled.dropped.items()},
    }


def staleness(episodes: Sequence[Episode], credits: Iterable[StepCredit], weight_version: int) -> dict[str, float]:
    """Return `tokens/staleness...`: publishes since trained tokens were sampled; empty if versions are unknown."""
    trained = {(credit.session_id, credit.trace_id) for credit in credits if credit.dropped is None}
    steps = ((item.session_id, step) for item in episodes for path in item.trajectories for step in path.steps)
    ages = [
        float(weight_version - version)
        for session_id, step in steps
        if (session_id, step.id) in trained
        for version in token_versions(step)
    ]
    return {**_mean("tokens/staleness", ages), **({"tokens/staleness_max": max(ages)} if ages else {})}


def memory_metrics(parts: Mapping[str, int]) -> dict[str, float]:
    """Return `memory/...` in gigabytes: parts in bytes, and the peaks of this process and its GPU since it began."""
    peaks = {"memory/peak_gb": peak_memory() / GB}
    if torch.cuda.is_available():
        peaks["memory/gpu_peak_gb"] = torch.cuda.max_memory_allocated() / GB
    return {**{f"memory/{part}_gb": size / GB for part, size in parts.items()}, **peaks}


def eval_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `eval/...` of the held-out tasks."""
    return {
        **{f"eval/{name}": value for name, value in _reported(episodes).items()},
        **_by_role("eval/reward", episodes),
        **{f"eval/{name}": value for name, value in _by_source(episodes).items()},
        **_by_part("eval/part", episodes),
        **_mean("eval/accuracy", _verdicts(episodes)),
        **_mean("eval/reward", rewards_of(episodes)),
        "eval/truncated": _cut_off(
            [step for episode in episodes for path in episode.trajectories for step in path.steps]
        ),
        "eval/num_episodes": float(len(episodes)),
        "eval/num_failed": float(sum(episode.failed for episode in episodes)),
        "eval/num_unscored": float(sum(why_unscored(episode) is not None for episode in episodes)),
    }


def rates(
    times: Mapping[str, float], episodes: Sequence[Episode], num_trained: float = 0.0, *, ahead: bool = False
) -> dict[str, float]:
    """Return `timing/..._s` of the phases of a step and their sum, and tokens per second of step, rollouts and update.

    With `ahead`, rollouts begin before their step, which waits only for the remainder, so their rate is omitted.
    """
    sampled = sum(len(step.response_ids) for item in episodes for path in item.trajectories for step in path.steps)
    total = sum(times.values())
    return {
        **{f"timing/{name}_s": seconds for name, seconds in times.items()},
        "timing/step_s": total,
        "tokens/sampled": float(sampled),
        "tokens/per_second": sampled / total,
        **{
            f"tokens/per_second_{name}": tokens / times[name]
            for name, tokens in (("rollout", sampled), ("update", num_trained))
            if times.get(name) and not (ahead and name == "rollout")
        },
    }


def _cut_off(steps: Sequence[Step]) -> float:
    return sum(step.finish_reason == "length" for step in steps) / max(len(steps), 1)


def _verdicts(episodes: Iterable[Episode]) -> list[float]:
    """Return 1 for each correct episode and 0 for the others, failed ones included."""
    return [float(bool(episode.is_correct)) for episode in episodes if why_unscored(episode) is None]


def why_unusable(episode: Episode) -> str | None:
    """Return why nothing can be learned from an episode; `None` if something can."""
    if not episode.failed and any(path.final_reward() is not None for path in episode.trajectories):
        return None
    return why_failed(episode) or f"not scored: {episode.info.get('unscored', 'it has no reward')}"


def failure_report(phase: str, reasons: Sequence[str | None]) -> str:
    """Return a report of the reasons, most frequent first, why some or all rollouts are unusable."""
    unusable = [reason for reason in reasons if reason]
    lines = [f"  {reason}" for reason in count_reasons(unusable)[:3]]
    if len(unusable) == len(reasons):
        head = f"{all_of(len(reasons), 'rollout')} failed, so there is nothing to learn from:"
    else:
        head = f"{len(unusable)} of {len(reasons)} rollouts failed or were not scored:"
    return "\n".join([f"{phase}: {head}", *lines])


def error_of_all(episodes: Sequence[Episode]) -> type[RolloutError]:
    """Return the class of the error that ended every rollout: the one for the user's code if that failed in each."""
    names = {episode.info.get("error", {}).get("type") for episode in episodes}
    own: dict[str, type[RolloutError]] = {error.__name__: error for error in (AgentError, EnvError, RewardError)}
    return own[names.pop()] if len(names) == 1 and names <= own.keys() else RolloutError


def rewards_of(episodes: Iterable[Episode]) -> list[float]:
    """Return the reward of every scored trajectory in episodes that did not fail."""
    return [reward for reward in _final_rewards(episodes) if reward is not None]


def _final_rewards(episodes: Iterable[Episode]) -> list[float | None]:
    return [path.final_reward() for path in _paths(episodes)]


def _paths(episodes: Iterable[Episode]) -> Iterator[Trajectory]:
    return (path for episode in episodes if not episode.failed for path in episode.trajectories)


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean under its name; nothing if there are no values, since the mean is then unknown, not zero."""
    return {name: fmean(values)} if values else {}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = quantiles(values, n=10, method="inclusive")
    return {f"{name}_p10": cuts[0], f"{name}_p90": cuts[-1]}


def _by_role(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    rewards = ((path.name, path.final_reward()) for path in _paths(episodes))
    by_role = grouped((role, reward) for role, reward in rewards if reward is not None)
    metrics: dict[str, float] = {}
    for role, found in by_role.items() if len(by_role) > 1 else ():
        metrics |= _mean(f"{name}/{role}", found) | _spread(f"{name}/{role}", found)
    return metrics


def _by_source(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the reward and accuracy of each source's episodes, and its fraction of all; nothing without sources."""
    metrics: dict[str, float] = {}
    for source, found in grouped((episode.info.get(SOURCE_KEY), episode) for episode in episodes).items():
        if source is None:
            continue
        metrics |= _mean(f"source/{source}/reward", rewards_of(found))
        metrics |= _mean(f"source/{source}/accuracy", _verdicts(found))
        metrics[f"source/{source}/share"] = len(found) / len(episodes)
    return metrics


def success_rates(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the fraction of correct rollouts of each task; rollouts that failed or were not scored are left out."""
    by_task = grouped((plain_task_id(episode.task_id), episode) for episode in episodes if not episode.failed)
    verdicts = {task_id: _verdicts(found) for task_id, found in by_task.items()}
    return {task_id: fmean(found) for task_id, found in verdicts.items() if found}


def _by_part(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean of each named part of the rewards, unweighted."""
    by_part = grouped(pair for path in _paths(episodes) for pair in path.reward_parts.items())
    return {f"{name}/{part}": fmean(values) for part, values in by_part.items()}


def _reported(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means of the metrics that agents report in `Episode.metrics`, as `agent/...` unless they name a group."""
    names = {name for episode in episodes for name in episode.metrics}
    return {
        name if "/" in name else f"agent/{name}": fmean(item.metrics[name] for item in episodes if name in item.metrics)
        for name in sorted(names)
    }


_VERDICT = re.compile(r"accuracy$|/solve_|/pass@")
"""Metrics that count unscored episodes as wrong."""


@dataclass(frozen=True, kw_only=True)
class EpisodeMetrics:
    """Metrics of the episodes of a run: rewards of rollouts. Metrics of demonstrations are a subclass."""

    needs_rewards: bool = True
    """Unscored episodes cannot be used."""

    def why_unusable(self, episode: Episode) -> str | None:
        """Return why nothing can be learned from an episode; `None` if something can."""
        if not self.needs_rewards and not episode.failed:
            return None
        return why_unusable(episode)

    def of_training(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the metrics of the episodes of a training step."""
        return _scored({**episode_metrics(episodes), **known_training_metrics(episodes)}, episodes)

    def of_evaluation(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the metrics of held-out episodes, including `eval/...`. Called in a thread, so it may block."""
        return _scored({**eval_metrics(episodes), **known_eval_metrics(episodes)}, episodes)


def _scored(metrics: dict[str, float], episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics without accuracy if no episode was scored."""
    if any(why_unusable(episode) is None for episode in episodes):
        return metrics
    return {name: value for name, value in metrics.items() if not _VERDICT.search(name)}
