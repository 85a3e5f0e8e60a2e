"""Explanation of an episode from the store: reward, group, baseline and advantage of every step and token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from rllm.capture.side_calls import side_calls
from rllm.errors import ConfigError
from rllm.evaluation.report import mean_of_known
from rllm.store.base import TraceStore, every_session
from rllm.types import JSONObject, Message, StepCredit, Trace, credits_by_trace, grouped, token_versions
from rllm.viewer.rollouts import StoredRollout, rollout_of

Fed: TypeAlias = Callable[[int, str], Sequence[Sequence[float]]]
"""Function of a training step and a call. It returns the advantages that the optimizer was fed for the call's tokens,
one list for each trajectory that was trained on them; none if the batch was not kept."""


@dataclass(frozen=True, kw_only=True)
class ExplainedToken:
    """One sampled token."""

    position: int
    """Position in the prompt and answer together."""
    token_id: int
    sampler_logprob: float
    trainer_logprob: float | None
    """Log-probability before the update; `None` if the token was not trained on."""
    advantage: float | None
    """Advantage; the mean over the step if single tokens are credited and the batch was not kept."""
    weight_version: int | None


@dataclass(frozen=True, kw_only=True)
class ExplainedStep:
    """One model call as a step of one trajectory, with its credit."""

    trace_id: str
    role: str
    training_step: int | None
    """`None` if the episode was not trained on, as in an evaluation."""
    reward: float | None
    group_id: str | None
    baseline: float | None
    advantage: float | None
    dropped: str | None
    side_call: str | None
    """Reason that it is in no trajectory, if it is a side call; see `rllm.capture.side_calls`."""
    weight_version: int | None
    num_prompt_tokens: int
    tokens: list[ExplainedToken] = field(default_factory=list)
    answer: Message = field(default_factory=dict)

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens in the optimizer's batch."""
        return sum(token.trainer_logprob is not None for token in self.tokens)

    @property
    def advantage_sum(self) -> float:
        """Sum of advantages over the tokens in the optimizer's batch."""
        return sum(token.advantage or 0.0 for token in self.tokens if token.trainer_logprob is not None)


@dataclass(frozen=True, kw_only=True)
class ListedEpisode:
    """An episode that can be explained."""

    episode_id: str
    session_id: str
    split: str
    step: int | None
    """Step as in metrics: the training step, or the number of steps before an evaluation."""
    rewards: dict[str, float | None]
    """Reward by role, the mean if a role has several trajectories; empty for an episode that has not ended."""
    reward_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Named parts of the reward by role, of its last trajectory that has some."""
    verdicts: dict[str, JSONObject] = field(default_factory=dict)
    """Metadata of the reward by role, such as a judge's reasons."""
    error: dict[str, str] | None = None
    """`type`, `message` and `traceback` of the error; type `unreadable` if another program wrote the outcome."""

    def to_dict(self) -> JSONObject:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ExplainedEpisode(ListedEpisode):
    """An episode with its calls in order; a call that trajectories share is listed once for each."""

    steps: list[ExplainedStep]

    @property
    def is_of_training(self) -> bool:
        """True unless it belongs to an evaluation or to another program."""
        return self.split == "train" or any(step.training_step is not None for step in self.steps)


def latest_episodes(
    store: TraceStore, *, limit: int, split: str | None = None, step: int | None = None, run_id: str | None = None
) -> list[ListedEpisode]:
    """Return the newest episodes of a split, step or run, newest first."""
    rollouts = (item for item in map(rollout_of, every_session(store, run_id=run_id)) if item.task_id)
    chosen = (item for item in rollouts if split in (None, item.split) and step in (None, item.step))
    return [ListedEpisode(**_outcome(item)) for item in itertools.islice(chosen, limit)]


def _outcome(rollout: StoredRollout) -> JSONObject:
    """Return the fields of a `ListedEpisode`."""
    error = rollout.error
    if rollout.unreadable:
        error = {"type": "unreadable", "message": "another program wrote the outcome of this rollout", "traceback": ""}
    rewards = grouped((path.name, path.reward) for path in rollout.paths)
    return {
        "episode_id": _episode_id(rollout),
        "session_id": rollout.session_id,
        "split": rollout.split,
        "step": rollout.step,
        "rewards": {role: mean_of_known(values) for role, values in rewards.items()},
        "reward_parts": {path.name: path.reward_parts for path in rollout.paths if path.reward_parts},
        "verdicts": {path.name: path.verdict for path in rollout.paths if path.verdict},
        "error": error,
    }


def _episode_id(rollout: StoredRollout) -> str:
    return f"{rollout.task_id}:{rollout.index}" if rollout.task_id else rollout.session_id


def explain(
    store: TraceStore,
    episode: str,
    *,
    split: str | None = None,
    step: int | None = None,
    run_id: str | None = None,
    fed: Fed | None = None,
) -> ExplainedEpisode:
    """Return the newest episode of this id or session, of a split, step or run if given.

    Ids are as in `latest_episodes` and logs; every evaluation of a run repeats them. `fed` returns the
    advantages of single tokens. Raises `ConfigError`, naming some episodes, if the store does not have this one.
    """
    known = itertools.chain([store.session(episode)], every_session(store, run_id=run_id))
    rollouts = (rollout_of(session) for session in known if session is not None)
    rollout = next(
        (
            item
            for item in rollouts
            if item.session_id == episode
            or (_episode_id(item) == episode and split in (None, item.split) and step in (None, item.step))
        ),
        None,
    )
    if rollout is None:
        some = ", ".join(item.episode_id for item in latest_episodes(store, limit=5, run_id=run_id))
        which = "".join(f", {name}={value}" for name, value in (("split", split), ("step", step)) if value is not None)
        others = f"; the newest are {some}, and `rllm explain RUN` lists more" if some else ", which has no episodes"
        raise ConfigError(f"episode={episode!r}{which} is not in the store{others}")
    credits_of = credits_by_trace(store.credits(rollout.session_id))
    calls = store.by_session(rollout.session_id)
    aside = side_calls(calls)
    return ExplainedEpisode(
        **_outcome(rollout),
        steps=[
            step
            for trace in calls
            if trace.error is None
            for step in _steps(trace, credits_of.get(trace.id, []), fed, aside.get(trace.id))
        ],
    )


def _steps(
    trace: Trace, credits_: Sequence[StepCredit], fed: Fed | None, side_call: str | None
) -> Iterator[ExplainedStep]:
    trained = [credit for credit in credits_ if credit.trainer_logprobs]
    for credit in credits_:
        siblings = [item for item in trained if item.training_step == credit.training_step]
        found = fed(credit.training_step, trace.id) if fed is not None and credit in siblings else []
        # Ids are unique only within a session: if the lengths differ, the tokens belong to another call.
        if len(found) == len(siblings) and {*map(len, found)} == {len(trace.response_ids)}:
            yield _step(trace, credit, found[siblings.index(credit)])
        else:
            yield _step(trace, credit, [credit.advantage] * len(trace.response_ids))
    if not credits_:
        yield _step(trace, None, [None] * len(trace.response_ids), side_call)


def _step(
    trace: Trace, credit: StepCredit | None, advantages: Sequence[float | None], side_call: str | None = None
) -> ExplainedStep:
    scored = credit.trainer_logprobs if credit and credit.trainer_logprobs else [None] * len(trace.response_ids)
    versions: Sequence[int | None] = token_versions(trace) or [None] * len(trace.response_ids)
    decided = ("training_step", "reward", "group_id", "baseline", "advantage", "dropped")
    return ExplainedStep(
        **{name: getattr(credit, name, None) for name in decided},
        trace_id=trace.id,
        role=credit.trajectory_name if credit else "",
        side_call=side_call,
        weight_version=trace.weight_version,
        num_prompt_tokens=len(trace.prompt_ids),
        answer=trace.response,
        tokens=[
            ExplainedToken(
                position=len(trace.prompt_ids) + place,
                token_id=token_id,
                sampler_logprob=sampled,
                trainer_logprob=scored_one,
                advantage=advantage,
                weight_version=version,
            )
            for place, (token_id, sampled, scored_one, advantage, version) in enumerate(
                zip(trace.response_ids, trace.logprobs, scored, advantages, versions, strict=True)
            )
        ],
    )
