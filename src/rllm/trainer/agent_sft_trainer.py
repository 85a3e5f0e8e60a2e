"""`AgentSFTTrainer`: supervised fine-tuning on conversations, or on the best earlier rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar, TypeAlias

from rllm.algorithms.base import Algorithm
from rllm.backends.base import TrainingBackend
from rllm.data.dataset import Dataset
from rllm.engine.episode_log import EPISODES, EpisodeLog
from rllm.engine.failures import why_failed
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import Rollout
from rllm.errors import ConfigError, concerning
from rllm.store import open_store
from rllm.store.base import TraceStore
from rllm.tracking.about import run_id_of
from rllm.tracking.base import Tracker
from rllm.trainer.agent_trainer import AgentTrainer, TaskSource
from rllm.trainer.config import ConfigSource, TrainConfig, load_config
from rllm.trainer.credit import Roles, assemble
from rllm.trainer.demonstrations import FIELD, Demonstration, prepared
from rllm.trainer.episode_records import filled, folder_of, named_store
from rllm.trainer.metrics import EpisodeMetrics, rewards_of
from rllm.trainer.rollout_sources import RolloutContext, RolloutSource
from rllm.trainer.sampled_rows import (
    Row,
    process_trajectories,
    rows_of_episode,
    rows_of_items,
    rows_of_store,
    sampled_from,
)
from rllm.trainer.settings import check_model
from rllm.types import Episode, Trajectory

DemonstrationSource: TypeAlias = TaskSource | Iterable[Trajectory] | Iterable[Episode]


class AgentSFTTrainer(AgentTrainer):
    """Trainer on demonstrations, with the loop, checkpoints, metrics and settings of `AgentTrainer`.

    A row has either `messages` in the OpenAI format (and `tools`, if the model was offered any), of which answers with
    a `weight` other than 0 are learned, or token ids, as `process_trajectories` returns them. Trajectories, episodes, a
    file of either, and the folder of an earlier run or evaluation are accepted as well; their sampled tokens are
    learned unchanged.
    """

    process_trajectories = staticmethod(process_trajectories)

    def __init__(
        self,
        config: ConfigSource = None,
        train_dataset: DemonstrationSource = (),
        val_dataset: DemonstrationSource | None = None,
        backend: str | None = None,
        *,
        trackers: Sequence[Tracker] = (),
        resume: bool = False,
    ) -> None:
        """Check everything that can be checked before work starts, and render every row.

        Args:
            config: see `AgentTrainer`. `algorithm.name` is `sft` unless it names your own algorithm; `sft.*` selects
                what is learned; `tasks_per_step` is the number of demonstrations in a step.
            train_dataset: demonstrations.
            val_dataset: held-out demonstrations, from which `eval/loss` and `eval/perplexity` are computed.
            backend: the same as `config.backend`.
            trackers: see `AgentTrainer`.
            resume: see `AgentTrainer`.

        Raises:
            ConfigError: naming the row or the setting that is wrong, and the remedy.
        """
        chosen = load_config(config)
        if "algorithm" not in chosen.model_fields_set:
            chosen.algorithm = {"name": "sft"}
        elif "name" not in chosen.algorithm:
            chosen.algorithm = {"name": "sft", **chosen.algorithm}
        if "group_size" not in chosen.rollout.model_fields_set:
            chosen.rollout.group_size = 1
        best = chosen.keep_best
        if best in ("eval/loss", "eval/perplexity"):
            raise ConfigError(
                f"keep_best={best!r} keeps the checkpoint with the highest value, which is the worst one: use "
                f"keep_best=-{best}"
            )
        check_model(chosen)
        rows = sampled_from(
            _rows(train_dataset, "train_dataset"),
            reward_threshold=chosen.sft.reward_threshold,
            best_per_task=chosen.sft.best_per_task,
        )
        super().__init__(
            source=DemonstrationRollouts(),
            train_dataset=_prepared(rows, chosen, "train_dataset"),
            val_dataset=None
            if val_dataset is None
            else _prepared(_rows(val_dataset, "val_dataset"), chosen, "val_dataset"),
            config=chosen,
            backend=backend,
            trackers=trackers,
            resume=resume,
        )


def _rows(source: object, name: str) -> list[Row]:
    """Return the rows of any source that a user may give; raise `ConfigError` if it is empty or cannot be read."""
    if isinstance(source, str | Path) and (url := named_store(source)) is not None:
        folder = folder_of(source)
        with closing(open_store(url, read_only=True)) as store:
            if (folder / EPISODES).exists():  # an evaluation: its rewards are in this file, not in the store
                episodes = EpisodeLog.read(folder / EPISODES)
                rows = [row for episode in episodes for row in rows_of_episode(filled(episode, store))]
            else:
                rows = rows_of_store(store, run_id_of(folder) if Path(source).expanduser().is_dir() else None)
        if not rows:
            raise ConfigError(
                f"{name}={str(source)!r} has no rollouts with a reward, and no session of a gateway with a number as "
                "`reward` in its metadata: set it by POST /sessions or the store's open_session"
            )
        return rows
    items: Iterable[object]
    if isinstance(source, str | Path) or callable(source):
        with concerning(name):
            items = Dataset.load(source)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        items = source
    else:
        raise ConfigError(f"{name}={source!r:.100}: use rows, trajectories, episodes, or what Dataset.load reads")
    with concerning(name):
        rows = rows_of_items(items)
    if not rows:
        raise ConfigError(f"{name} is empty: give it at least one demonstration")
    return rows


def _prepared(rows: Sequence[Row], config: TrainConfig, name: str) -> Dataset:
    from rllm.inference.local.loading import tokenizer_of

    of = tokenizer_of(config.model)
    lengths = [length for length in (config.model.max_length, of.context_length) if length is not None]
    with concerning(name):
        found = prepared(rows, of, config.sft, min(lengths, default=None))
        names = {row[FIELD].name for row in found}
        if all(name in config.roles and not config.roles[name].trainable for name in names):
            settings = " and ".join(f"roles.{name}.trainable=false" for name in sorted(names))
            raise ConfigError(f"no row has a role that is trained ({settings}): give it rows with another 'name'")
    return found


@dataclass(frozen=True, kw_only=True)
class DemonstrationRollouts(RolloutSource):
    """Rows of `demonstrations.prepared`."""

    demonstrates: ClassVar[bool] = True

    def check(self, data: Dataset) -> None:
        for number, row in enumerate(data):
            if not isinstance(row.get(FIELD), Demonstration):
                raise ConfigError(f"row {number} is not a demonstration: use AgentSFTTrainer, which prepares the rows")

    def open(self, context: RolloutContext) -> AbstractContextManager[Rollout]:
        return nullcontext(Demonstrator(context.store))

    def episode_metrics(self, algorithm: Algorithm, backend: TrainingBackend, roles: Roles) -> EpisodeMetrics:
        return DemonstrationMetrics(algorithm=algorithm, backend=backend, roles=roles)


class Demonstrator:
    """A `Rollout` without model calls: the store gets a session for the trainer's records, but no traces."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """Return the attempt's row as an episode."""
        if attempt.trainable:
            about = {name: getattr(attempt, name) for name in ("task_id", "index", "split", "run_id")}
            await asyncio.wrap_future(self._store.open_session(attempt.session_id, about))
        return Episode(
            task=attempt.task,
            task_id=attempt.task_id,
            index=attempt.index,
            session_id=attempt.session_id,
            trajectories=[attempt.task[FIELD].trajectory()],
        )


@dataclass(frozen=True, kw_only=True)
class DemonstrationMetrics(EpisodeMetrics):
    """Metrics of demonstrations: likelihoods instead of rewards."""

    algorithm: Algorithm
    backend: TrainingBackend
    roles: Roles

    def why_unusable(self, episode: Episode) -> str | None:
        return why_failed(episode)

    def of_training(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return `sft/reward`: the mean reward of demonstrations that were sampled and scored."""
        rewards = rewards_of(episodes)
        return {"sft/reward": fmean(rewards)} if rewards else {}

    def of_evaluation(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return `eval/loss`, computed as in training, and `eval/perplexity`, from the mean over tokens."""
        batch = assemble(episodes, self.algorithm, step=0, temperature=1.0, roles=self.roles).batch
        logprobs = self.backend.score(batch).float()
        losses, _ = self.algorithm.surrogate(logprobs, logprobs, batch)
        return {
            "eval/loss": float((losses * batch.weights).sum()),
            "eval/perplexity": float((-logprobs.mean()).exp()),
            "eval/num_tokens": float(batch.num_tokens),
            "eval/num_episodes": float(len(episodes)),
        }
