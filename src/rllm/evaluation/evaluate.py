"""Evaluation of an agent on a dataset; only rollouts that are missing or failed before are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from rllm.config.sampling import derived_seed
from rllm.data.dataset import Dataset
from rllm.engine.episode_log import EpisodeLog, check_ids
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import Rollout, RolloutRunner
from rllm.engine.scoring import Scoring
from rllm.errors import ConfigError
from rllm.evaluation.folder import EvaluationFolder, dataset_identity
from rllm.evaluation.report import Outcome, Report, report_on, with_costs
from rllm.store.codec import readable_json
from rllm.types import Episode, JSONMapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of an evaluation."""

    num_planned: int
    num_done: int
    """Finished rollouts, kept ones included."""
    num_kept: int
    num_correct: int
    num_failed: int


class Evaluation:
    """Planned rollouts and their outcomes: those in the folder's log, and each new one."""

    def __init__(
        self, planned: Sequence[RolloutRequest], folder: EvaluationFolder, log: EpisodeLog, scoring: Scoring
    ) -> None:
        """Read the outcomes in the log; use `opened`, which holds the folder."""
        self.folder = folder
        self._scoring = scoring
        self._log = log
        self._planned = {(attempt.task_id, attempt.index): attempt for attempt in planned}
        logged = (Outcome.of(episode) for episode in EpisodeLog.read(folder.episodes))
        # A repeated rollout has several lines: the last one counts.
        self._outcomes = {
            key: outcome for outcome in logged if (key := (outcome.task_id, outcome.index)) in self._planned
        }

    @classmethod
    @contextmanager
    def opened(
        cls,
        dataset: Iterable[JSONMapping],
        *,
        folder: str | Path,
        identity: Mapping[str, str],
        num_rollouts: int = 1,
        limit: int | None = None,
        sampling: JSONMapping | None = None,
        scoring: Scoring | None = None,
    ) -> Iterator[Self]:
        """Plan an evaluation and hold its folder.

        Opened again with the same arguments, only missing and failed rollouts remain; more rollouts or a higher limit
        add to the existing ones.

        Args:
            dataset: tasks, as a `Dataset` or rows; rows with the same id are one task.
            folder: folder of the episodes and the report.
            identity: agent, model and the like, such as `{"agent": ..., "model": ...}`; dataset and sampling are added.
            num_rollouts: rollouts of each row.
            limit: number of first rows to use; all by default.
            sampling: parameters imposed on every model call, over those the agent asks for. A `seed` applies to the
                whole evaluation: each rollout gets one derived from it.
            scoring: completes the rewards of rollouts. With a reward of groups, all rollouts of a task are made again
                if one of them is missing or failed.

        Raises:
            ConfigError: if the folder has another evaluation or is in use, or the dataset or a setting is wrong.
        """
        sampling = sampling or {}
        dataset = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        planned = _attempts(dataset, num_rollouts, limit, sampling)
        place = EvaluationFolder(Path(folder))
        imposed = readable_json(sampling, sort_keys=True).decode()
        with (
            place.claimed({**identity, "dataset": dataset_identity(dataset), "sampling": imposed}),
            EpisodeLog(place.episodes, tokens=False) as log,
        ):
            yield cls(planned, place, log, scoring or Scoring())

    @property
    def missing(self) -> list[RolloutRequest]:
        """Planned rollouts that are not made yet, or failed, in the order of the dataset."""
        keys = {key for key in self._planned if not self._is_done(key)}
        if self._scoring.group_reward is not None:
            tasks = {task_id for task_id, _ in keys}
            keys = {key for key in self._planned if key[0] in tasks}
        return [attempt for key, attempt in self._planned.items() if key in keys]

    @property
    def num_planned(self) -> int:
        """Number of planned rollouts."""
        return len(self._planned)

    @property
    def num_done(self) -> int:
        """Number of rollouts that were made and did not fail."""
        return sum(map(self._is_done, self._planned))

    async def run(
        self,
        rollout: Rollout,
        *,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        num_retries: int = 1,
        on_progress: Callable[[Progress], None] | None = None,
        on_episode: Callable[[Episode], object] | None = None,
    ) -> None:
        """Make the missing rollouts.

        Every episode is in the log as soon as it ends, so stopping loses only rollouts under way.

        Args:
            rollout: makes a rollout; the caller starts and stops its engine.
            max_concurrent: rollouts under way at a time.
            timeout_s: seconds after which a rollout fails.
            num_retries: repetitions of a rollout whose inference server failed.
            on_progress: called at the start and after every rollout.
            on_episode: called with every episode once it is in the log.
        """
        missing = self.missing
        made = {(attempt.task_id, attempt.index) for attempt in missing}
        kept = [outcome for key, outcome in self._outcomes.items() if key not in made]
        counts = Counter(done=len(kept), correct=sum(outcome.is_correct for outcome in kept))

        def keep(episode: Episode) -> None:
            self._log.append(with_costs(episode))
            if on_episode is not None:
                on_episode(episode)
            outcome = self._outcomes[episode.task_id, episode.index] = Outcome.of(episode)
            episode.trajectories = []  # the log has them; the runner would hold all tokens until the end
            counts.update(done=1, correct=outcome.is_correct, failed=outcome.failure is not None)
            report_progress()

        def report_progress() -> None:
            if on_progress is not None:
                on_progress(
                    Progress(
                        num_planned=len(self._planned),
                        num_done=counts["done"],
                        num_kept=len(kept),
                        num_correct=counts["correct"],
                        num_failed=counts["failed"],
                    )
                )

        runner = RolloutRunner(
            rollout,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            num_retries=num_retries,
            scoring=self._scoring,
        )
        report_progress()
        await runner.run(missing, on_episode=keep)

    def report(self, ratios: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> Report:
        """Return the report on all finished rollouts, and write it into the folder.

        `ratios` adds metrics that are the ratio of two others, such as the followed fraction of all instructions.
        """
        report = report_on([self._outcomes[key] for key in self._planned if key in self._outcomes])
        means = report.metrics
        means |= {name: means[part] / means[whole] for name, (part, whole) in ratios.items() if means.get(whole)}
        self.folder.write_report(report)
        return report

    def _is_done(self, key: tuple[str, int]) -> bool:
        outcome = self._outcomes.get(key)
        return outcome is not None and outcome.failure is None


def _attempts(dataset: Dataset, num_rollouts: int, limit: int | None, sampling: JSONMapping) -> list[RolloutRequest]:
    """Return `num_rollouts` of every row. Rows with one id are one task, so their rollouts share one numbering."""
    if num_rollouts < 1:
        raise ConfigError(f"num_rollouts={num_rollouts}: use at least 1")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: use at least 1 task, or leave it out")
    if not len(dataset):
        raise ConfigError("the dataset is empty: give it at least one task")
    check_ids(dataset, limit)
    next_index: Counter[str] = Counter()
    seed = sampling.get("seed")  # one for each rollout: with the same, all rollouts of a task would be equal
    attempts = []
    for row, task in enumerate(dataset[:limit]):
        task_id = dataset.task_id(row)
        for _ in range(num_rollouts):
            index = next_index[task_id]
            seeds = {} if seed is None else {"seed": derived_seed(seed, "eval", task_id, index)}
            attempts.append(
                RolloutRequest(
                    task=task,
                    task_id=task_id,
                    index=index,
                    sampling={**sampling, **seeds},
                    tokens_required=False,
                    split="eval",
                    source=dataset.source_of(row),
                )
            )
            next_index[task_id] += 1
    return attempts
