"""Records of episodes: the outcome stored with the traces of each, and episodes read back from a folder."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

from rllm.engine.episode_log import EPISODES, EpisodeLog, Key, plain_task_id, read_tasks
from rllm.engine.join import DEFAULT_NAME
from rllm.errors import ConfigError, StoreError
from rllm.rewards.scoring import is_number
from rllm.store import open_store
from rllm.store.base import SessionInfo, TraceStore, every_session
from rllm.store.codec import readable_json
from rllm.tracking.about import STORE, run_id_of, store_of_run, way_to_a_run
from rllm.types import (
    DRIFT_KEY,
    OUTCOME_KEY,
    SOURCE_KEY,
    VERDICT_KEY,
    Episode,
    JSONMapping,
    JSONObject,
    Step,
    StepCredit,
    Task,
    TerminationReason,
    Trajectory,
    is_scored,
)

Credited = tuple[str, int, str]
"""Session id, index of the trajectory (several may share a call), and trace id."""

_MAX_TEXT = 4000
"""Characters kept of an error or traceback: its end, which names the cause."""


async def keep_outcomes(store: TraceStore, episodes: Sequence[Episode], credits: Iterable[StepCredit] = ()) -> None:
    """Store the outcome of each episode with its session, durable on return; skip episodes without a session."""
    credit_of = {(credit.session_id, credit.trajectory_index, credit.trace_id): credit for credit in credits}

    def keep() -> None:
        known = [episode for episode in episodes if store.session(episode.session_id) is not None]
        for write in [note_outcome(store, episode, credit_of) for episode in known]:
            write.result()

    await asyncio.to_thread(keep)


def note_outcome(
    store: TraceStore, episode: Episode, credit_of: Mapping[Credited, StepCredit] = MappingProxyType({})
) -> Future[None]:
    """Start to store how an episode ended in the metadata of its session; see `outcome_of`."""
    return store.open_session(episode.session_id, {OUTCOME_KEY: outcome_of(episode, credit_of)})


def outcome_of(episode: Episode, credit_of: Mapping[Credited, StepCredit]) -> JSONObject:
    """Return how an episode ended, with its rewards and metrics, as JSON values.

    Args:
        episode: the episode, after its rollout and any training on it.
        credit_of: the trainer's records of its steps, by session, trajectory and trace.
    """
    error = episode.info.get("error")
    return {
        "ended": episode.termination_reason.value if episode.termination_reason else None,
        "is_correct": episode.is_correct,
        "error": None if error is None else {name: str(text)[-_MAX_TEXT:] for name, text in error.items()},
        "warnings": [str(warning) for warning in episode.info.get("warnings", ())],
        "metrics": dict(episode.metrics),
        "trajectories": [_trajectory_record(index, episode, credit_of) for index in range(len(episode.trajectories))],
    }


def _trajectory_record(index: int, episode: Episode, credit_of: Mapping[Credited, StepCredit]) -> JSONObject:
    path = episode.trajectories[index]
    decided = [credit_of.get((episode.session_id, index, step.id)) for step in path.steps]
    known = [credit for credit in decided if credit is not None]
    reasons = {credit.dropped for credit in known}
    scored: list[Trajectory | Step] = [path, *path.steps]
    answers = [step.chat_completions[-1] for step in path.steps if step.chat_completions]
    calls = [call for answer in answers for call in answer.get("tool_calls") or () if isinstance(call, Mapping)]
    return {
        "name": path.name or DEFAULT_NAME,
        "reward": path.final_reward() if all(map(_is_finite, scored)) else None,
        **({"reward_parts": dict(path.reward_parts)} if path.reward_parts else {}),
        **({VERDICT_KEY: _short(verdict)} if isinstance(verdict := path.info.get(VERDICT_KEY), Mapping) else {}),
        "trainable": path.trainable,
        "advantage": next((credit.advantage for credit in known if credit.advantage is not None), None),
        "dropped": next((credit.dropped for credit in known if credit.dropped), None) if None not in reasons else None,
        "num_tokens": sum(len(step.response_ids) for step in path.steps),
        "truncated": any(step.finish_reason == "length" for step in path.steps),
        "tools": sorted({str((call.get("function") or {}).get("name")) for call in calls}),
        "steps": [_step_record(step, credit) for step, credit in zip(path.steps, decided, strict=True)],
    }


def _short(verdict: JSONMapping) -> JSONObject:
    """Return a verdict as JSON values of bounded size."""
    short: JSONObject = {}
    for name, value in verdict.items():
        text = value if isinstance(value, str) else readable_json(value).decode()
        short[str(name)] = text[:_MAX_TEXT] if isinstance(value, str) or len(text) > _MAX_TEXT else json.loads(text)
    return short


def _step_record(step: Step, credit: StepCredit | None) -> JSONObject:
    """Return the record of a step: only the reward, advantage and drift that it has."""
    record: JSONObject = {"id": step.id}
    if is_scored(step.reward) and _is_finite(step):
        record["reward"] = step.reward
    if credit is not None and credit.advantage is not None:
        record["advantage"] = credit.advantage
    if DRIFT_KEY in step.info:
        record["drift"] = step.info[DRIFT_KEY]
    return record


def _is_finite(item: Trajectory | Step) -> bool:
    reward = item.reward
    return not is_scored(reward) or (reward is not None and is_number(reward) and math.isfinite(reward))


TOOLS_KEY = "tools"
"""Key of a step's `info` for the tools that its call was offered."""


def stored_episodes(folder: Path, tasks: Mapping[Key, Task] | None = None) -> Iterator[Episode]:
    """Yield every episode that has ended, oldest first, with its task, rewards, messages and tokens.

    `info` has the `split`, and for training episodes the `training_step` (from 0). Of rollouts that an evaluation
    repeated, the last is used. `tasks` are the tasks of a run whose folder does not keep them. Raises `ConfigError` if
    the folder is not one of a run or evaluation, and `StoreError` if traces or outcomes cannot be read.
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
                    try:
                        episode = episode_of(session, known)
                    except (KeyError, TypeError, ValueError, AttributeError) as error:
                        raise StoreError(
                            f"session {session.id!r}: its outcome ({OUTCOME_KEY}) has an unknown format "
                            f"({type(error).__name__}: {error}); to continue without it: "
                            f"rllm traces delete {session.id} --store {url}"
                        ) from error
                    yield filled(episode, store)


def store_of(folder: Path) -> str:
    """Return the path or URL of the traces of a run or evaluation; raise `ConfigError` for another folder."""
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "no such folder"
        raise ConfigError(
            f"run={str(folder)!r}: {what}; use the folder of a run or an evaluation: "
            f"{way_to_a_run(folder, or_evaluation=True)}"
        )
    url = store_of_run(folder)
    if url is None:
        inside = sorted(path.name for path in folder.iterdir() if (path / STORE).is_file())
        hint = f"; did you mean {str(folder / inside[-1])!r}?" if inside else ""
        raise ConfigError(f"run={str(folder)!r} has no {STORE}, so it is not the folder of a run or evaluation{hint}")
    return url


def named_store(source: str | Path) -> str | None:
    """Return the path or URL of the traces in a .db file, or in the folder of a run; `None` for another source."""
    path = Path(source).expanduser()
    return str(path) if path.suffix == ".db" and path.is_file() else store_of_run(folder_of(path))


def folder_of(source: str | Path) -> Path:
    """Return the folder that is named directly or by a file in it."""
    path = Path(source).expanduser()
    return path.parent if path.is_file() and (path.suffix == ".db" or path.name == EPISODES) else path


def episode_of(session: SessionInfo, tasks: Mapping[Key, Task]) -> Episode:
    """Return the episode of a session with an outcome, without messages and tokens; see `filled`."""
    about, outcome = session.metadata, session.metadata[OUTCOME_KEY]
    split, task_id = str(about.get("split", "")), str(about.get("task_id", ""))
    info: JSONObject = {name: about[name] for name in ("split", "training_step", SOURCE_KEY) if name in about}
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
        trajectories=[
            Trajectory.from_dict(
                {
                    "name": path["name"],
                    "reward": path.get("reward"),
                    "reward_parts": path.get("reward_parts") or {},
                    "info": {VERDICT_KEY: path[VERDICT_KEY]} if VERDICT_KEY in path else {},
                    "trainable": path.get("trainable", True),
                    "steps": [{"id": step["id"], "reward": step.get("reward")} for step in path.get("steps") or ()],
                }
            )
            for path in outcome.get("trajectories") or ()
        ],
    )


def was_learnable(episode: Episode, path: Trajectory) -> bool:
    """Return whether a trajectory could be learned from, unlike an opponent's.

    All held-out rollouts of a run are marked as not trainable, so for them the mark means nothing.
    """
    is_held_out = episode.info.get("split") != "train"
    return path.trainable or (is_held_out and not any(other.trainable for other in episode.trajectories))


def filled(episode: Episode, store: TraceStore) -> Episode:
    """Fill an episode that has no token ids with messages, tools and tokens from the store, and return it."""
    traces = {trace.id: trace for trace in store.by_session(episode.session_id) if trace.error is None}
    for step in (step for trajectory in episode.trajectories for step in trajectory.steps):
        if (trace := traces.get(step.id)) is not None:
            if not step.response_ids:
                step.fill_from(trace)
            if trace.tools:
                step.info[TOOLS_KEY] = trace.tools
    for trajectory in episode.trajectories:
        trajectory.task = episode.task if trajectory.task is None else trajectory.task
    return episode
