"""What the optimiser was fed beside what was sampled: the same ids, the same contexts, the same sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rllm.types import StepCredit, Trace
from rllm.viewer.batches import FedBatch, FedSequence, digest_of
from rllm.viewer.metrics import Row
from rllm.viewer.rollouts import Rollout

_CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Check:
    """Two numbers that must agree."""

    name: str
    fed: float | None
    stored: float | None
    explained: str

    @property
    def agrees(self) -> bool | None:
        """`None`: one of them is not known."""
        if self.fed is None or self.stored is None:
            return None
        return math.isclose(self.fed, self.stored, rel_tol=_CLOSE, abs_tol=_CLOSE)


@dataclass(kw_only=True)
class CheckedSequence:
    """One sequence of the batch, compared with the store."""

    number: int
    sequence: FedSequence
    rollout: Rollout | None = None
    role: str = ""
    num_fed: int = 0
    num_sampled: int = 0
    same_ids: bool | None = None
    """Whether the trained ids are the sampled ones; `None` if the store has lost them."""
    same_context: bool | None = None
    """Whether the whole sequence, prompts included, is that of the last call."""
    advantage: float = 0.0
    """The sum over its tokens, as fed."""
    credited: float = 0.0
    """The sum over its tokens, as the store has it."""
    weight: float = 0.0
    first_difference: str = ""


@dataclass(kw_only=True)
class Truth:
    """A step's batch, and what came of comparing it."""

    batch: FedBatch
    checks: list[Check] = field(default_factory=list)
    sequences: list[CheckedSequence] = field(default_factory=list)
    left_out: list[tuple[str, int, int]] = field(default_factory=list)
    """Why sampled tokens were not fed: the reason, calls, tokens."""


Calls = Callable[[str], tuple[list[Trace], list[StepCredit]]]


def truth_of(batch: FedBatch, rollouts: Sequence[Rollout], calls_of: Calls, row: Row) -> Truth:
    """Compare a step's batch with the rollouts that the store has of it.

    Args:
        batch: as it was fed.
        rollouts: of that step.
        calls_of: traces and credits of a session.
        row: the step's metrics.
    """
    traces: dict[str, tuple[Trace, StepCredit | None, Rollout]] = {}
    for rollout in rollouts:
        found, credits_ = calls_of(rollout.session_id)
        credit_of = {credit.trace_id: credit for credit in credits_ if credit.training_step == batch.step - 1}
        traces |= {trace.id: (trace, credit_of.get(trace.id), rollout) for trace in found}
    truth = Truth(batch=batch)
    truth.sequences = [_checked(number, sequence, batch, traces) for number, sequence in enumerate(batch.sequences)]
    truth.left_out = _left_out(batch, traces)
    truth.checks = _checks(batch, truth, traces, row)
    return truth


def _checked(
    number: int, sequence: FedSequence, batch: FedBatch, traces: Mapping[str, tuple[Trace, StepCredit | None, Rollout]]
) -> CheckedSequence:
    told = CheckedSequence(number=number, sequence=sequence)
    told.num_fed = sum(span.tokens.stop - span.tokens.start for span in sequence.spans)
    tokens = slice(sequence.spans[0].tokens.start, sequence.spans[-1].tokens.stop) if sequence.spans else slice(0, 0)
    told.advantage, told.weight = (sum(batch.numbers[name][tokens]) for name in ("advantage", "weight"))
    known = [traces.get(span.trace_id) for span in sequence.spans]
    if any(item is None for item in known):
        return told
    told.same_ids = True
    for span, item in zip(sequence.spans, known, strict=True):
        assert item is not None
        trace, credit, told.rollout = item
        told.num_sampled += len(trace.response_ids)
        told.role = credit.trajectory_name if credit else told.role
        told.credited += (credit.advantage or 0.0) * len(trace.response_ids) if credit else 0.0
        fed = batch.ids[span.tokens]
        if fed != trace.response_ids:
            told.same_ids = False
            place = next(
                (at for at, (one, other) in enumerate(zip(fed, trace.response_ids, strict=False)) if one != other),
                min(len(fed), len(trace.response_ids)),
            )
            told.first_difference = told.first_difference or f"call {span.trace_id}, token {place}"
    last = known[-1]
    assert last is not None
    told.same_context = digest_of([*last[0].prompt_ids, *last[0].response_ids]) == sequence.digest
    return told


def _left_out(
    batch: FedBatch, traces: Mapping[str, tuple[Trace, StepCredit | None, Rollout]]
) -> list[tuple[str, int, int]]:
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for trace, credit, rollout in traces.values():
        if trace.id in batch.by_trace:
            continue
        reason = (credit.dropped if credit else None) or (
            "failed" if rollout.error else "no advantage" if credit else "of no trajectory"
        )
        calls[reason] += 1
        tokens[reason] += len(trace.response_ids)
    return [(reason.replace("_", " "), count, tokens[reason]) for reason, count in calls.most_common()]


def _checks(
    batch: FedBatch, truth: Truth, traces: Mapping[str, tuple[Trace, StepCredit | None, Rollout]], row: Row
) -> list[Check]:
    fed = [traces[trace_id] for trace_id in batch.by_trace if trace_id in traces]
    is_whole = len(fed) == len(batch.by_trace)
    sampled = [trace for trace, _, _ in fed]
    credited = [sum(credit.trainer_logprobs) for _, credit, _ in fed if credit and credit.trainer_logprobs is not None]
    trained = row.get("tokens/trained", 0 if row and not batch.num_tokens else None)
    return [
        Check(
            name="tokens",
            fed=batch.num_tokens,
            stored=sum(len(trace.response_ids) for trace in sampled) if is_whole else None,
            explained="ids that carry a loss, and ids that were sampled for them",
        ),
        Check(name="tokens in metrics", fed=batch.num_tokens, stored=trained, explained="tokens/trained of this step"),
        Check(
            name="sequences with the sampled ids",
            fed=len(truth.sequences),
            stored=sum(item.same_ids is True for item in truth.sequences) if is_whole else None,
            explained="compared id by id",
        ),
        Check(
            name="sequences in the sampled context",
            fed=len(truth.sequences),
            stored=sum(item.same_context is True for item in truth.sequences) if is_whole else None,
            explained="prompts and answers, by their digest",
        ),
        Check(
            name="sum of the sampler's log-probabilities",
            fed=batch.sampler_logprob_sum,
            stored=sum(sum(trace.logprobs) for trace in sampled) if is_whole else None,
            explained="as the batch had it, and as the store has it",
        ),
        Check(
            name="sum of advantages",
            fed=sum(batch.numbers["advantage"]),
            stored=sum(item.credited for item in truth.sequences) if is_whole else None,
            explained="token by token, and by what each call was credited with",
        ),
        Check(
            name="calls with trainer log-probabilities",
            fed=len(batch.by_trace),
            stored=len(credited) if is_whole else None,
            explained="every fed token was scored by the trainer",
        ),
    ]
