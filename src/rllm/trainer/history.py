"""The episodes of an earlier run or evaluation, put together again from what its folder keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rllm.engine.episode_log import EPISODES, EpisodeLog, Key, plain_task_id, read_tasks
from rllm.errors import ConfigError, StoreError
from rllm.store import open_store
from rllm.store.base import SessionInfo, TraceStore, every_session
from rllm.tracking.about import run_id_of
from rllm.tracking.own_runs import STORE, store_of_run
from rllm.trainer.run_folder import way_to_a_run
from rllm.types import OUTCOME_KEY, Episode, Step, TerminationReason, Trace, Trajectory

TOOLS_KEY = "tools"
"""Where the `info` of a step of such an episode keeps the tools that its call was offered."""


def stored_episodes(folder: Path, tasks: Mapping[Key, Any] | None = None) -> Iterator[Episode]:
    """Every episode that has ended, oldest first, with its task, rewards, messages and tokens.

    `info` says the `split`, and of training episodes the `training_step` (from 0). Of a rollout that an evaluation made
    again, the last counts. `tasks` are those of a run whose folder does not keep them.

    Raises:
        ConfigError: if the folder is of no run and of no evaluation.
        StoreError: if the traces, or what was noted of a rollout's end, cannot be read.
    """
    url = store_of(folder)
    with closing(open_store(url, read_only=True)) as store:
        if (folder / EPISODES).is_file():
            latest = {(episode.task_id, episode.index): episode for episode in EpisodeLog.read(folder / EPISODES)}
            for episode in latest.values():
                filled(episode, store)
                episode.info.setdefault("split", "eval")
                yield episode
        else:
            known = {**(tasks or {}), **read_tasks(folder)}
            for session in every_session(store, oldest_first=True, run_id=run_id_of(folder)):
                if session.metadata.get(OUTCOME_KEY) is not None:
                    yield filled(_read_episode(session, known, url), store)


def store_of(folder: Path) -> str:
    """Path or URL of the traces of a run or an evaluation.

    Raises:
        ConfigError: if the folder is of neither.
    """
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(
            f"run={str(folder)!r}: {what}; name the folder of a run or an evaluation: {way_to_a_run(folder)}"
        )
    url = store_of_run(folder)
    if url is None:
        inside = sorted(path.name for path in folder.iterdir() if (path / STORE).is_file())
        hint = f"; did you mean {str(folder / inside[-1])!r}?" if inside else ""
        raise ConfigError(f"run={str(folder)!r} has no {STORE}, so it is the folder of no run and no evaluation{hint}")
    return url


def named_store(source: str | Path) -> str | None:
    """Path or URL of the traces that this is, or that this folder of a run or an evaluation has; `None` for anything else."""
    path = Path(source).expanduser()
    return str(path) if path.suffix == ".db" and path.is_file() else store_of_run(folder_of(path))


def folder_of(source: str | Path) -> Path:
    """The folder that is named, by itself or by a file in it."""
    path = Path(source).expanduser()
    return path.parent if path.is_file() and (path.suffix == ".db" or path.name == EPISODES) else path


def _read_episode(session: SessionInfo, tasks: Mapping[Key, Any], url: str) -> Episode:
    try:
        return _episode(session, tasks)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"session {session.id!r}: what was noted of its rollout's end ({OUTCOME_KEY}) is of another form than ours "
            f"({type(error).__name__}: {error}); to go on without it, rllm traces delete {session.id} --store {url}"
        ) from error


def _episode(session: SessionInfo, tasks: Mapping[Key, Any]) -> Episode:
    about, outcome = session.metadata, session.metadata[OUTCOME_KEY]
    split, task_id = str(about.get("split", "")), str(about.get("task_id", ""))
    info: dict[str, Any] = {name: about[name] for name in ("split", "training_step") if name in about}
    if outcome.get("error"):
        info["error"] = {name: str(outcome["error"].get(name, "")) for name in ("type", "message", "traceback")}
    return Episode(
        task_id=task_id,
        index=int(about.get("index") or 0),
        session_id=session.id,
        task=tasks.get((split, plain_task_id(task_id))),
        termination_reason=TerminationReason(outcome["ended"]) if outcome.get("ended") else None,
        is_correct=bool(outcome.get("is_correct")),
        metrics=dict(outcome.get("metrics") or {}),
        info=info,
        trajectories=[_trajectory(path) for path in outcome.get("trajectories") or ()],
    )


def _trajectory(told: Mapping[str, Any]) -> Trajectory:
    steps = [{"id": step["id"], "reward": step.get("reward")} for step in told.get("steps") or ()]
    about = {"name": told["name"], "reward": told.get("reward"), "trainable": told.get("trainable", True)}
    return Trajectory.from_dict({**about, "steps": steps})


def was_learnable(episode: Episode, path: Trajectory) -> bool:
    """Whether a trajectory could be learned from: not one that was marked otherwise, such as an opponent's. Of a run's held-out
    rollouts all are marked, so there the mark tells nothing."""
    is_held_out = episode.info.get("split") != "train"
    return path.trainable or (is_held_out and not any(other.trainable for other in episode.trajectories))


def filled(episode: Episode, store: TraceStore) -> Episode:
    """The same episode, whose record has no token ids, with what the store has of its calls: messages, tools, tokens."""
    traces = {trace.id: trace for trace in store.by_session(episode.session_id) if trace.error is None}
    for step in (step for trajectory in episode.trajectories for step in trajectory.steps):
        if (trace := traces.get(step.id)) is not None:
            _fill_step(step, trace)
    for trajectory in episode.trajectories:
        trajectory.task = episode.task if trajectory.task is None else trajectory.task
    return episode


def _fill_step(step: Step, trace: Trace) -> None:
    if not step.response_ids:
        step.fill_from(trace)
    if trace.tools:
        step.info[TOOLS_KEY] = trace.tools
