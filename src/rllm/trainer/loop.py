"""The training loop: the file to read first.

Each step rolls tasks out, turns the episodes into a batch, updates the weights on it and publishes them. The loop knows
no backend, no agent and no algorithm by name; it uses only the protocols of the objects that it is given.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shlex
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from rllm._runtime.threads import BACKEND_THREAD, SerialExecutor
from rllm.algorithms.base import Algorithm
from rllm.backends.base import TrainingBackend, UpdateResult
from rllm.backends.update import update_weights
from rllm.config.schema import TrainConfig
from rllm.data.dataset import Dataset
from rllm.data.sampling import TaskSampler
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.errors import CheckpointError, TokenMismatchError
from rllm.store.base import TraceStore
from rllm.tracking.base import Trackers
from rllm.trainer.batch_log import BatchLog
from rllm.trainer.checkpoint import Checkpoints, generator_states, score_of
from rllm.trainer.credit import Assembled, assemble
from rllm.trainer.episode_records import keep_outcomes
from rllm.trainer.metrics import (
    EpisodeMetrics,
    batch_metrics,
    error_of_all,
    failure_report,
    memory_metrics,
    rates,
    staleness,
    success_rates,
)
from rllm.trainer.opponents import OpponentPool
from rllm.trainer.rollouts import eval_attempts, training_attempts
from rllm.trainer.run_health import RunHealth
from rllm.trainer.selection import (
    ReplayBuffer,
    credits_of_failed,
    drop_filtered,
    drop_uniform,
    num_informative,
    warn_of_side_call,
    warn_of_unknown_roles,
)
from rllm.trainer.sequences import step_spans
from rllm.trainer.teacher import Teacher
from rllm.types import Episode, JSONMapping, JSONObject, StepCredit

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingLoop:
    """Everything that a run consists of."""

    config: TrainConfig
    backend: TrainingBackend
    algorithm: Algorithm
    runner: RolloutRunner
    store: TraceStore
    trackers: Trackers
    checkpoints: Checkpoints
    train_data: Dataset
    sampler: TaskSampler
    """Chooses the tasks of each step."""
    replay: ReplayBuffer
    """Groups of recent steps to train on again."""
    val_data: Dataset | None = None
    episode_metrics: EpisodeMetrics = field(default_factory=EpisodeMetrics)
    """Turns episodes into metrics."""
    health: RunHealth = field(default_factory=RunHealth)
    """Warns of steps that learn nothing or diverge."""
    teacher: Teacher | None = None
    """Teacher model for distillation, if the algorithm uses one."""
    opponents: OpponentPool | None = None
    """Earlier policies that self-play is against, if the agent asks for them."""
    batch_log: BatchLog | None = None
    """Log of batches for `rllm view`."""
    num_unattributed_calls: Callable[[], int] = lambda: 0
    """Returns the number of calls during rollouts that named no session."""
    run_id: str | None = None
    """Name of the run in a store that several runs share."""
    identity: JSONMapping = field(default_factory=dict)
    """Settings and data that a resumed run must share with this one."""
    steps_done: int = 0
    """Training steps done by earlier processes, then by this one."""
    evaluated_at: int = -1
    """Number of steps after which the policy was last evaluated."""
    score: float | None = None
    """The metric `keep_best` of that evaluation."""
    _num_unattributed: int = field(default=0, init=False)
    """Number of these calls when the last step was logged."""
    _is_first: bool = field(default=True, init=False)
    """True until this process has done its first step."""
    _has_named_side_call: bool = field(default=False, init=False)
    """True once an example of the calls in `dropped/side_call` was logged."""
    _is_whole: bool = field(default=True, init=False)
    """True while weights and records match `steps_done` steps; a failed update may leave them in between."""
    _state: JSONObject = field(default_factory=dict, init=False)
    """State for the checkpoint of the last whole step."""
    _thread: SerialExecutor = field(default_factory=SerialExecutor, init=False)
    """Thread of the backend: always the same, so that its memory and helper threads stay with it."""

    async def run(self) -> None:
        """Train until `num_steps` are done.

        However the run ends, the last whole step is saved, unless a later update has failed halfway. Before the first
        step, only an evaluation is worth saving.
        """
        await self._note_state()
        failure: Exception | None = None
        try:
            if self._owes_evaluation():
                await self.evaluate()
                if self.steps_done and self._is_best():
                    await self.save()
            while self.steps_done < self.config.num_steps:
                await self.step()
                if self._due(self.config.eval.every):
                    await self.evaluate()
                if self._due(self.config.save_every) or self._is_best():
                    await self.save()
        except Exception as error:
            failure = error
            raise
        finally:
            is_begun = self.steps_done > 0 or bool(self.val_data and self.evaluated_at == 0)
            if is_begun and self._is_whole and not isinstance(failure, CheckpointError):
                await self._save_at_the_end(failure)
            self._thread.close()

    async def step(self) -> None:
        """Run one training step. Once its update has begun, it is completed even if the run is being stopped."""
        times: dict[str, float] = {}
        with _timed(times, "rollout"):
            episodes = await self._episodes_of(self.steps_done)
        again = "; Ctrl-C again discards it" if threading.current_thread() is threading.main_thread() else ""
        await _to_the_end(self._learn(episodes, times), f"step {self.steps_done + 1} is finished{again}")

    async def _learn(self, episodes: Sequence[Episode], times: dict[str, float]) -> None:
        """Update the weights on these episodes, publish them, and record the step in store and trackers."""
        if self._is_first:
            warn_of_unknown_roles(self.config.roles, episodes)
            self._is_first = False
        if not self._has_named_side_call:
            self._has_named_side_call = await self._in_thread(warn_of_side_call, episodes, self.store)
        self.trackers.progress("assemble", 0, 1)
        replayed = self.replay.sample(self.steps_done)
        with _timed(times, "assemble"):
            assembled = await self._assembled(episodes, replayed)
        self.trackers.progress("update", 0, 1)
        ages = staleness([*episodes, *replayed], assembled.credits, self.backend.weight_version)
        self._is_whole = False
        with _timed(times, "update"):
            update = await self._in_thread(update_weights, self.backend, assembled.batch, self.algorithm)
        with _timed(times, "publish"):
            version = await self._in_thread(self.backend.publish)
        self.replay.add(self.steps_done, episodes, assembled.credits)
        self.sampler.record(self.steps_done, success_rates(self._sampled(episodes)))
        self.steps_done += 1
        if self.opponents is not None:
            await self._in_thread(self.opponents.after_step, self.steps_done)
        with _timed(times, "explain"):
            await self._explain(assembled, update, episodes)
        metrics = self._metrics(episodes, assembled, update, times) | ages | memory_metrics(update.memory)
        if self.config.data.replay:
            metrics["batch/replayed"] = len(replayed) / (len(episodes) + len(replayed))
        metrics |= self.health.check(self.steps_done, metrics, episodes)
        self.trackers.log(self.steps_done, {**metrics, "policy/weight_version": float(version)})
        self.trackers.log_episodes(self.steps_done, "train", episodes)
        await self._note_state()
        self._is_whole = True

    async def _assembled(self, episodes: Sequence[Episode], replayed: Sequence[Episode]) -> Assembled:
        """Return the batch of these episodes, without those that filters drop, and of replayed ones."""
        drop_filtered(episodes, self.config.filters)
        if self.config.rollout.resample_rounds:
            drop_uniform(episodes, self.algorithm)
        return await self._in_thread(
            assemble,
            [*episodes, *replayed],
            self.algorithm,
            step=self.steps_done,
            temperature=self.config.rollout.temperature,
            scorer=self.backend,
            teacher=self.teacher,
            roles=self.config.roles,
        )

    def _metrics(
        self, episodes: Sequence[Episode], assembled: Assembled, update: UpdateResult, times: Mapping[str, float]
    ) -> dict[str, float]:
        num_trained, ahead = update.metrics.get("tokens/trained", 0.0), self.config.rollout.max_staleness > 0
        num_before, self._num_unattributed = self._num_unattributed, self.num_unattributed_calls()
        unattributed = {"dropped/unattributed_call": float(self._num_unattributed - num_before)}
        return {
            **self.episode_metrics.of_training(self._sampled(episodes)),
            **batch_metrics(assembled),
            **(unattributed if self._num_unattributed > num_before else {}),
            **update.metrics,
            **rates(times, episodes, num_trained, ahead=ahead),
        }

    def _sampled(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes without the greedy rollouts, which have the index after the others of their task."""
        return [episode for episode in episodes if episode.index < self.config.rollout.group_size]

    async def evaluate(self) -> list[Episode]:
        """Roll out the held-out tasks and log the results.

        If every rollout fails before the first step, the run ends. Later, training continues, and a run that is resumed
        here evaluates again.
        """
        episodes: list[Episode] = []
        if self.val_data:
            started = time.perf_counter()
            attempts = eval_attempts(self.val_data, self.config, step=self.steps_done)
            episodes = await self._roll_out("evaluate", attempts, may_fail=self.steps_done > 0)
            metrics = await self._in_thread(self.episode_metrics.of_evaluation, episodes)
            metrics["timing/eval_s"] = time.perf_counter() - started
            self.trackers.log(self.steps_done, metrics)
            self.trackers.log_episodes(self.steps_done, "eval", episodes)
            await keep_outcomes(self.store, episodes)
            if all(map(self.episode_metrics.why_unusable, episodes)):
                return episodes
            is_known = self.checkpoints.best_score() is not None
            self.score = score_of(metrics, self.config.keep_best, is_known=is_known)
        self.evaluated_at = self.steps_done
        await self._note_state()
        return episodes

    async def save(self) -> None:
        """Save the weights and everything needed to resume from the last whole step."""
        self.trackers.progress("save", 0, 1)
        saving = self._in_thread(self.checkpoints.save, self.steps_done, self.backend.save, self._state)
        await _to_the_end(saving, f"step {self.steps_done} is saved")

    async def _save_at_the_end(self, failure: Exception | None) -> None:
        """Save. If that fails as well, for example because a worker has ended, the run's own error is raised."""
        task = asyncio.current_task()
        if task is not None and task.cancelling() and not self.checkpoints.have(self.steps_done):
            logger.warning("stopping when step %d is saved", self.steps_done)
        try:
            await self.save()
        except CheckpointError as error:
            if failure is None:
                raise
            logger.warning("%s", error)

    async def _note_state(self) -> None:
        """Record the state that a checkpoint of this moment saves with the weights.

        Whatever is drawn and stored from here on belongs to the next step, which a resumed run repeats.
        """
        self._state = {
            "config": self.config.model_dump(mode="json"),
            "identity": dict(self.identity),
            "evaluated_at": self.evaluated_at,
            "score": self.score if self.evaluated_at == self.steps_done else None,
            "rng": generator_states(),
            "last_session": await self._last_session(),
            "success_rates": self.sampler.records,
            "replay": self.replay.sessions,
            "health": self.health.state,
            "algorithm": self.algorithm.state(),
        }

    async def _last_session(self) -> str | None:
        """Return the newest session in the store; sessions of the next steps come after it."""
        newest = await self._in_thread(self.store.sessions, limit=1)
        return newest[0].id if newest else None

    def _owes_evaluation(self) -> bool:
        due = self._due(self.config.eval.every) if self.steps_done else self.config.eval.at_start
        return due and self.evaluated_at < self.steps_done

    def _is_best(self) -> bool:
        score = self._state["score"]
        if score is None:
            return False  # without reading the disk
        best = self.checkpoints.best_score()
        return best is None or score > best

    async def _episodes_of(self, step: int) -> list[Episode]:
        """Return the rollouts that a step is trained on: of its tasks, and of replacements for uninformative ones."""
        attempts = self._attempts(step, self.sampler.tasks_of_step(step))
        episodes = await self._roll_out("roll out", attempts, rank=step)
        num_drawn = 0
        for extra_round in range(1, self.config.rollout.resample_rounds + 1):
            drop_filtered(episodes, self.config.filters)
            missing = self.config.tasks_per_step - num_informative(episodes, self.algorithm, self.config.roles)
            if missing <= 0:
                break
            rows = self.sampler.more_tasks_of_step(step, num_drawn=num_drawn, count=missing)
            more = self._attempts(step, rows, extra_round=extra_round)
            num_drawn += missing
            episodes += await self._roll_out(f"roll out more ({extra_round})", more, rank=step, may_fail=True)
        return episodes

    def _attempts(self, step: int, rows: Sequence[int], *, extra_round: int = 0) -> list[RolloutRequest]:
        return training_attempts(self.train_data, rows, self.config, self.algorithm, step=step, extra_round=extra_round)

    async def _roll_out(
        self, phase: str, attempts: Sequence[RolloutRequest], *, rank: int = 0, may_fail: bool = False
    ) -> list[Episode]:
        """Run the attempts, before others of a higher rank.

        Raises:
            RolloutError: if every attempt failed or was not scored, with the reasons. Not with `may_fail`, which is for
                the few that replace others, and for evaluations during training.
        """
        attempts = [replace(attempt, run_id=self.run_id) for attempt in attempts]
        num_done = itertools.count(1)
        self.trackers.progress(phase, 0, len(attempts))
        episodes = await self.runner.run(
            attempts,
            on_episode=lambda episode: self.trackers.progress(phase, next(num_done), len(attempts), episode),
            rank=rank,
        )
        reasons = [self.episode_metrics.why_unusable(episode) for episode in episodes]
        if all(reasons) and not may_fail:
            await keep_outcomes(self.store, episodes)  # now, since nothing comes after this
            where = f"Details of each: rllm explain {shlex.quote(str(self.checkpoints.run_dir))}"
            raise error_of_all(episodes)(f"{failure_report(phase, reasons)}\n{where}")
        if any(reasons):
            logger.warning("%s", failure_report(phase, reasons))
        return episodes

    async def _explain(self, assembled: Assembled, update: UpdateResult, episodes: Sequence[Episode]) -> None:
        failed = await self._in_thread(credits_of_failed, episodes, self.store, step=self.steps_done - 1)
        own = {episode.session_id for episode in episodes}  # replayed ones keep the records of their own step
        explained = [credit for credit in _with_logprobs(assembled, update) if credit.session_id in own]
        await asyncio.wrap_future(self.store.annotate([*explained, *failed]))
        await keep_outcomes(self.store, episodes, [*assembled.credits, *failed])
        if self.batch_log is not None:
            await self._in_thread(self.batch_log.write, self.steps_done, assembled.batch, update, self.algorithm)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the backend's thread while the event loop continues."""
        return await self._thread.run(partial(function, *args, **kwargs), name=BACKEND_THREAD)

    def _due(self, every: int) -> bool:
        return self.steps_done == self.config.num_steps or (every > 0 and self.steps_done % every == 0)


def _with_logprobs(assembled: Assembled, update: UpdateResult) -> list[StepCredit]:
    """Return the credits with the trainer's log-probabilities of the tokens in the batch."""
    if update.logprobs is None:
        return assembled.credits
    if len(update.logprobs) != assembled.batch.num_tokens:
        raise TokenMismatchError(
            f"the backend returned {len(update.logprobs)} log-probabilities for {assembled.batch.num_tokens} tokens"
        )
    logprobs: dict[tuple[str, int, str], list[float]] = {}
    for (number, step_id), tokens in step_spans(assembled.batch):
        logprobs[*assembled.trajectories[number], step_id] = update.logprobs[tokens].tolist()
    return [
        replace(credit, trainer_logprobs=logprobs.get((credit.session_id, credit.trajectory_index, credit.trace_id)))
        for credit in assembled.credits
    ]


async def _to_the_end(work: Coroutine[Any, Any, object], what: str) -> None:
    """Await work that must not be interrupted; a cancellation takes effect after it. `what` is logged meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        logger.warning("stopping when %s", what)
        await task
        raise


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[name] = time.perf_counter() - started
