"""Requirements for every framework: each call in its session, each sampled token in the store, each conversation one sequence.

An agent is run twice: with a model that thinks and comments, and with one that does neither. The drift that its framework
causes is measured by rendering its messages again (`rerendering.py`), as a gateway without token-exact continuation does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rllm.algorithms.grpo import GRPO
from rllm.trainer.credit import assemble
from rllm.types import Episode, Step, Trace, Trajectory

from .forced_engine import ForcedEngine
from .rerendering import rerender
from .rollouts import Framework, Rollout, Run, drifts_of, num_sequences_of
from .shopping import PLAIN, THINKING, TOTAL, Mood, Speech

Endpoint = Literal["chat", "responses", "messages"]
ID_PREFIXES: dict[Endpoint, str] = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to use a framework, and its expected results."""

    way: str
    """Argument of `agent.py`."""
    endpoint: Endpoint
    streaming: bool = False
    num_calls: int = 3
    """Number of calls of the task: two with a tool call, and one with the answer."""
    num_side_calls: int = 0
    num_sequences: int = 1
    """Number of token sequences with token-exact continuation."""
    num_sequences_plain: int | None = None
    """The same for answers without reasoning, if it differs."""
    speech: Speech = field(default_factory=Speech)
    moods: tuple[Mood, ...] = (THINKING, PLAIN)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of the session."""
    notes: str = ""
    """Remark in the table."""

    def __str__(self) -> str:
        return self.way

    def expected_sequences(self, mood: Mood) -> int:
        """Return the number of token sequences with token-exact continuation."""
        other = None if mood.thinks else self.num_sequences_plain
        return self.num_sequences if other is None else other

    @property
    def described(self) -> dict[str, Any]:
        """Row of the table before anything is run."""
        return {"way": self.way, "endpoint": self.endpoint, "streaming": self.streaming, "notes": self.notes}


def prove(framework: Framework, variant: Variant, engine: ForcedEngine) -> dict[str, Any]:
    """Run the agent, and return its row of the table.

    Raises:
        AssertionError: if a requirement is not met.
    """
    row = variant.described
    for mood in variant.moods:
        rollout = _rollout(framework, variant, engine, mood)
        check_captured(rollout, variant)
        rerendered = rerender(rollout.turns, engine)
        num_sequences, drifts = num_sequences_of(rollout.turns), drifts_of(rollout.turns)
        assert num_sequences == variant.expected_sequences(mood), (mood.name, drifts)
        row |= {"calls": len(rollout.turns), "side_calls": len(rollout.side_calls)}
        row[mood.name] = {
            "sequences": num_sequences,
            "sequences_without": num_sequences_of(rerendered),
            "drift": drifts,
            "drift_without": drifts_of(rerendered),
        }
    return row


def _rollout(framework: Framework, variant: Variant, engine: ForcedEngine, mood: Mood) -> Rollout:
    run = Run(
        command=framework.command(variant.way),
        mood=mood,
        speech=variant.speech,
        variables={**framework.variables, **variant.variables},
    )
    return run(engine, f"{framework.name} {variant.way}/{mood.name}".replace(" ", "-").replace("/", "-"))


def check_captured(rollout: Rollout, variant: Variant) -> None:
    """Check that the agent answered, and that everything sampled for it is in its session."""
    assert rollout.program.exit_code == 0, rollout.program.stderr
    assert TOTAL in rollout.program.stdout, rollout.program.stdout
    assert [info.id for info in rollout.store.sessions()] == [rollout.session_id]
    check_tokens(rollout)
    assert (len(rollout.turns), len(rollout.side_calls)) == (variant.num_calls, variant.num_side_calls)
    for trace in rollout.turns:
        assert trace.id.startswith(ID_PREFIXES[variant.endpoint])
        assert ("first_token_s" in trace.timings) == variant.streaming


def check_tokens(rollout: Rollout) -> None:
    """Compare the store with the samples: prompts, answers and log-probabilities, number by number.

    A server counts a prompt's tokens by sampling one, which is not an answer.
    """
    assert rollout.traces
    stored = sorted((trace.prompt_ids, trace.response_ids, list(trace.logprobs)) for trace in rollout.traces)
    answers = [item for item in rollout.sampled if len(item.completion_ids) > 1]
    assert stored == sorted((item.prompt_ids, item.completion_ids, item.logprobs) for item in answers)
    assert all(trace.error is None for trace in rollout.traces)


def check_trained_once(episode: Episode, turns: Sequence[Trace]) -> None:
    """Check that the answers of all calls of the task are in the batch once, after their own prompts and with one advantage."""
    [trajectory] = episode.trajectories
    trajectory.reward = 1.0
    step = Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0])
    worse = Episode(task_id=episode.task_id, trajectories=[Trajectory(name=trajectory.name, steps=[step], reward=0.0)])
    batch = assemble([episode, worse], GRPO(normalize_std=False), step=0, temperature=1.0).batch
    trained = []
    for number, sequence in enumerate(batch.sequences[:-1]):
        logprobs = iter(sequence.logprobs or ())
        for span in sequence.spans:
            sampled = sequence.ids[span.start : span.stop]
            trained.append((sequence.ids[: span.start], sampled, [next(logprobs) for _ in sampled]))
        assert set(batch.advantages[batch.sequence_of == number].tolist()) == {0.5}
    stored = [(trace.prompt_ids, trace.response_ids, list(trace.logprobs)) for trace in turns]
    assert sorted(trained) == sorted(stored)


def check_returned_episode(episode: Episode, rollout: Rollout) -> None:
    """Check that an episode's steps are the samples for the task."""
    [trajectory] = episode.trajectories
    given_back = [(step.prompt_ids, step.response_ids, step.logprobs) for step in trajectory.steps]
    assert given_back == [(item.prompt_ids, item.completion_ids, item.logprobs) for item in rollout.sampled]
