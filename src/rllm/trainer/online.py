"""Online learning: the sessions of a gateway's users as rollouts, each once its reward has arrived.

The run's own gateway serves users with the newest weights, and other gateways may write to the same store. A session is
ready when it has a reward (`POST /sessions/ID/reward`). It is learned from once in a run, token for token; sessions of
a step that share a `task_id` in their metadata are compared with each other, others with a running mean of rewards
(`algorithms.reinforce.Online`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean

from rllm.algorithms.reinforce import BASELINE_KEY
from rllm.config.loading import ConfigSource, load_config
from rllm.config.sampling import NEUTRAL, is_neutral
from rllm.config.schema import TrainConfig, refuse_changes
from rllm.data.dataset import Dataset
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import Rollout
from rllm.errors import ConfigError
from rllm.sdk.variables import operators_keys
from rllm.store.base import SessionInfo, TraceStore, every_session
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.credit import DROPPED_KEY
from rllm.trainer.rollout_sources import RolloutContext, RolloutSource
from rllm.trainer.sampled_rows import learnable_steps, reward_of
from rllm.types import Episode, Step, Trace, Trajectory

logger = logging.getLogger(__name__)

LEARNED_KEY = "rllm.learned"
"""Metadata key of a session: the run that learns from it, and the training step."""
NO_LOGPROBS = "no_logprobs"
OTHER_SAMPLING = "other_sampling"

_BASELINE_WINDOW = 64
"""Number of latest rewards that the baseline is the mean of."""
_POLL_S = 0.5
_NO_DEADLINE_S = 10 * 365 * 24 * 3600.0


def session_trainer(store: str, config: ConfigSource = None, *, resume: bool = False) -> AgentTrainer:
    """Return a trainer that learns from the sessions in a store as their rewards arrive.

    A step waits for `tasks_per_step` of them. While the run lasts, its gateway serves users at `gateway.port`, with the
    key RLLM_GATEWAY_API_KEY; the updated weights answer their next calls.

    Raises:
        ConfigError: for settings that have no effect on sessions, and as `AgentTrainer`.
    """
    config = load_config(config)
    why = "on sessions of users, which the trainer does not sample; leave it out"
    refuse_changes(config.data, "data", ("weights", "sampling"), why)
    names = ("max_tokens", "max_steps", "resample_rounds", "max_staleness", "num_retries", "side_calls", "runner")
    refuse_changes(config.rollout, "rollout", names, why)
    if config.rollout.group_size != 1 and "group_size" in config.rollout.model_fields_set:
        raise ConfigError(f"rollout.group_size={config.rollout.group_size} would have no effect {why}")
    config.store, config.rollout.group_size = store, 1
    if "timeout_s" not in config.rollout.model_fields_set:
        config.rollout.timeout_s = _NO_DEADLINE_S
    own = config.algorithm if "algorithm" in config.model_fields_set else {}
    config.algorithm = {"name": "online", "correction": "truncate", **own}
    places = Dataset([{"id": f"session {number}"} for number in range(config.tasks_per_step)])
    return AgentTrainer(source=SessionSource(), train_dataset=places, config=config, resume=resume)


@dataclass(frozen=True, kw_only=True)
class SessionSource(RolloutSource):
    """Scored sessions of the run's store. A step's tasks are placeholders: it waits for as many sessions."""

    def check(self, data: Dataset) -> None:
        """Accept any task."""

    def open(self, context: RolloutContext) -> AbstractContextManager[Rollout]:
        return nullcontext(SessionRollouts(context.store, temperature=context.rollout.temperature))


class SessionRollouts:
    """A `Rollout` that waits for the next scored session."""

    def __init__(self, store: TraceStore, *, temperature: float) -> None:
        self._store, self._temperature = store, temperature
        self._reading = asyncio.Lock()
        self._ready: deque[tuple[SessionInfo, float]] = deque()
        """Scored sessions with their rewards."""
        self._seen: set[str] = set()
        """Sessions that are ready or were taken."""
        self._rewards: deque[float] = deque(maxlen=_BASELINE_WINDOW)

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """Return the next scored session as an episode; wait until there is one."""
        async with self._reading:
            while not self._ready:
                self._ready += await asyncio.to_thread(lambda: list(self._new_sessions(attempt)))
                if not self._ready:
                    await asyncio.sleep(_POLL_S)
            session, reward = self._ready.popleft()
            baseline = fmean(self._rewards or [reward])
            self._rewards.append(reward)
        mark = {LEARNED_KEY: {"run": attempt.run_id, "step": attempt.training_step}}
        await asyncio.wrap_future(self._store.open_session(session.id, mark))
        traces = await asyncio.to_thread(self._store.by_session, session.id)
        steps = learnable_steps(traces)
        trajectory = Trajectory(name="agent", steps=steps, reward=reward)
        trajectory.info[BASELINE_KEY] = baseline
        if (problem := self._problem_of(steps, traces)) is not None:
            reason, explanation = problem
            trajectory.info[DROPPED_KEY] = reason
            logger.warning("session %s is not learned from: %s", session.id, explanation)
        return Episode(
            task_id=str(session.metadata.get("task_id", session.id)),
            session_id=session.id,
            is_correct=reward >= 1.0,
            trajectories=[trajectory],
        )

    def _new_sessions(self, attempt: RolloutRequest) -> Iterator[tuple[SessionInfo, float]]:
        """Yield the scored sessions that were not learned from before this training step, oldest first."""
        for session in every_session(self._store, oldest_first=True):
            reward = reward_of(session.metadata)
            if reward is None or "split" in session.metadata or session.id in self._seen:
                continue
            self._seen.add(session.id)
            mark = session.metadata.get(LEARNED_KEY) or {}
            # Learned from by an earlier step of this run, which no resume repeats.
            if mark.get("run") == attempt.run_id and mark["step"] < (attempt.training_step or 0):
                self._rewards.append(reward)
            else:
                yield session, reward

    def _problem_of(self, steps: Sequence[Step], traces: Sequence[Trace]) -> tuple[str, str] | None:
        """Return why the tokens of a session cannot be learned from: the name of the reason, and a sentence."""
        if any(len(step.logprobs) != len(step.response_ids) for step in steps):
            return NO_LOGPROBS, "its server returned no log-probabilities of the sampled tokens"
        used = {step.id for step in steps}
        for trace in (trace for trace in traces if trace.id in used):
            temperature = trace.sampling.get("temperature", 1.0)
            if temperature != self._temperature:
                return OTHER_SAMPLING, (
                    f"it was sampled at temperature {temperature}, and rollout.temperature is {self._temperature:g}: "
                    "set it to the temperature of your program"
                )
            for name in NEUTRAL:
                value = trace.sampling.get(name)
                if value is not None and not is_neutral(name, value):
                    return (
                        OTHER_SAMPLING,
                        f"{name}={value} changes the probabilities that the policy is trained on: leave it out",
                    )
        return None


def serving_notice(config: TrainConfig) -> str:
    """Return a sentence on how users reach the policy of a run, or why they do not."""
    settings = config.gateway
    if not settings.port:
        return "The run learns from what other gateways store; set gateway.port=N to serve users itself"
    if "RLLM_GATEWAY_API_KEY" not in operators_keys():
        return f"gateway.port={settings.port}: RLLM_GATEWAY_API_KEY is not set, so users cannot know the gateway's key"
    url = f"http://{settings.host}:{settings.port}"
    return (
        f"Users call {url}/sessions/SESSION/v1 with the key RLLM_GATEWAY_API_KEY; rewards go to "
        f"POST {url}/sessions/SESSION/reward"
    )
