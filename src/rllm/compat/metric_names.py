"""Metrics under the names of the rLLM framework, in addition to ours, so that its users keep their charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from rllm.engine.failures import why_unscored
from rllm.types import Episode, grouped

DATA_SOURCE = "data_source"
"""Field of a task that names its dataset."""


def known_training_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `critic/score/...`, and the tasks that all, none or some rollouts solved: `batch/solve_...`."""
    scored = (path.final_reward() for episode in episodes if not episode.failed for path in episode.trajectories)
    rewards = [reward for reward in scored if reward is not None]
    solved = [fmean(found) for found in _by_task(episodes).values()]
    scores = {"mean": fmean(rewards), "max": max(rewards), "min": min(rewards)} if rewards else {}
    return {
        **{f"critic/score/{name}": value for name, value in scores.items()},
        "batch/solve_all": float(sum(share == 1.0 for share in solved)),
        "batch/solve_none": float(sum(share == 0.0 for share in solved)),
        "batch/solve_partial": float(sum(0.0 < share < 1.0 for share in solved)),
    }


def known_eval_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `val/pass@1`, with k rollouts of a task `val/pass@k`, and for each data source `val/<source>/pass@1`."""
    metrics = _passes("val", episodes)
    sources = grouped(
        (str(episode.task[DATA_SOURCE]), episode)
        for episode in episodes
        if isinstance(episode.task, Mapping) and DATA_SOURCE in episode.task
    )
    for source, theirs in sources.items():
        metrics.update(_passes(f"val/{source}", theirs))
    return metrics


def _passes(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    tasks = list(_by_task(episodes).values())
    if not tasks:
        return {}
    most = max(map(len, tasks))
    passes = {f"{name}/pass@1": fmean(fmean(found) for found in tasks)}
    return passes if most == 1 else {**passes, f"{name}/pass@{most}": fmean(float(any(found)) for found in tasks)}


def _by_task(episodes: Sequence[Episode]) -> dict[str, list[bool]]:
    """Return whether each scored rollout of a task was correct; failed ones are not, unscored ones are left out."""
    scored = (episode for episode in episodes if why_unscored(episode) is None)
    return grouped((episode.task_id, bool(episode.is_correct)) for episode in scored)
