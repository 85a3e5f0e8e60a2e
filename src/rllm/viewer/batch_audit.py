"""Audit of a batch against the store: the same ids, contexts and sums in what was fed and what was sampled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rllm.capture.side_calls import side_calls
from rllm.types import StepCredit, Trace, credits_by_trace
from rllm.viewer.batches import FedBatch, FedSequence, FedSpan, digest_of
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
        """True if both agree; `None` if one of them is unknown."""
        if self.fed is None or self.stored is None:
            return None
        return math.isclose(self.fed, self.stored, rel_tol=_CLOSE, abs_tol=_CLOSE)


@dataclass(kw_only=True)
class CheckedSequence:
    """Sequence of the batch, compared with the store."""

    number: int
    sequence: FedSequence
    rollout: Rollout | None = None
    role: str = ""
    num_fed: int = 0
    num_sampled: int = 0
    same_ids: bool | None = None
    """True if the trained ids are the sampled ones; `None` if the store has lost them."""
    same_context: bool | None = None
    """True if the whole sequence, prompts included, is that of the last call."""
    advantage: float = 0.0
    """Sum over its tokens in the batch."""
    credited: float = 0.0
    """Sum over its tokens in the store."""
    weight: float = 0.0
    first_difference: str = ""


@dataclass(kw_only=True)
class BatchAudit:
    """Batch of a step, and its comparison with the store."""

    batch: FedBatch
    checks: list[Check] = field(default_factory=list)
    sequences: list[CheckedSequence] = field(default_factory=list)
    left_out: list[tuple[str, int, int]] = field(default_factory=list)
    """Reasons that sampled tokens were not fed, each with its number of calls and tokens."""


Calls = Callable[[str], tuple[list[Trace], list[StepCredit]]]


@dataclass(frozen=True, kw_only=True)
class _StoredCall:
    """A call in the store."""

    trace: Trace
    credits: Sequence[StepCredit]
    """Credits of this step, in the order of the trajectories that share the call."""
    rollout: Rollout
    is_side_call: bool

    def credit_of(self, span: FedSpan) -> StepCredit | None:
        """Return the credit of a span; a batch has the trajectories that share a call in the order of the credits."""
        scored = [credit for credit in self.credits if credit.trainer_logprobs is not None] or self.credits
        return scored[min(span.place, len(scored) - 1)] if scored else None


def audit_batch(batch: FedBatch, rollouts: Sequence[Rollout], calls_of: Calls, row: Row) -> BatchAudit:
    """Compare a step's batch with the rollouts that the store has of it.

    Args:
        batch: the fed batch.
        rollouts: rollouts of that step.
        calls_of: traces and credits of a session.
        row: metrics of the step.
    """
    calls: dict[str, _StoredCall] = {}
    for rollout in rollouts:
        traces, credits_ = calls_of(rollout.session_id)
        credits_of = credits_by_trace(credit for credit in credits_ if credit.training_step == batch.step - 1)
        aside = side_calls(traces)
        for trace in traces:
            calls[trace.id] = _StoredCall(
                trace=trace,
                credits=credits_of.get(trace.id, ()),
                rollout=rollout,
                is_side_call=trace.id in aside,
            )
    audit = BatchAudit(batch=batch)
    audit.sequences = [_checked(number, sequence, batch, calls) for number, sequence in enumerate(batch.sequences)]
    audit.left_out = _left_out(batch, calls)
    audit.checks = _checks(batch, audit, calls, row)
    return audit


def _checked(number: int, sequence: FedSequence, batch: FedBatch, calls: Mapping[str, _StoredCall]) -> CheckedSequence:
    checked = CheckedSequence(number=number, sequence=sequence)
    checked.num_fed = sum(span.tokens.stop - span.tokens.start for span in sequence.spans)
    tokens = slice(sequence.spans[0].tokens.start, sequence.spans[-1].tokens.stop) if sequence.spans else slice(0, 0)
    checked.advantage, checked.weight = (sum(batch.numbers[name][tokens]) for name in ("advantage", "weight"))
    known = [calls[span.trace_id] for span in sequence.spans if span.trace_id in calls]
    if len(known) < len(sequence.spans):
        return checked
    checked.same_ids = True
    for span, call in zip(sequence.spans, known, strict=True):
        trace, credit, checked.rollout = call.trace, call.credit_of(span), call.rollout
        checked.num_sampled += len(trace.response_ids)
        checked.role = credit.trajectory_name if credit else checked.role
        checked.credited += (credit.advantage or 0.0) * len(trace.response_ids) if credit else 0.0
        fed = list(batch.ids[span.tokens])
        if fed != trace.response_ids:
            checked.same_ids = False
            place = next(
                (at for at, (one, other) in enumerate(zip(fed, trace.response_ids, strict=False)) if one != other),
                min(len(fed), len(trace.response_ids)),
            )
            checked.first_difference = checked.first_difference or f"call {span.trace_id}, token {place}"
    last = known[-1].trace
    checked.same_context = digest_of([*last.prompt_ids, *last.response_ids]) == sequence.digest
    return checked


def _left_out(batch: FedBatch, calls: Mapping[str, _StoredCall]) -> list[tuple[str, int, int]]:
    counts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for call in calls.values():
        if call.trace.id in batch.by_trace:
            continue
        reason = next((credit.dropped for credit in call.credits if credit.dropped), None) or (_why_uncredited(call))
        counts[reason] += 1
        tokens[reason] += len(call.trace.response_ids)
    return [(reason.replace("_", " "), count, tokens[reason]) for reason, count in counts.most_common()]


def _why_uncredited(call: _StoredCall) -> str:
    if call.rollout.error:
        return "failed"
    if call.credits:
        return "no advantage"
    return "side call" if call.is_side_call else "not in a trajectory"


def _checks(batch: FedBatch, audit: BatchAudit, calls: Mapping[str, _StoredCall], row: Row) -> list[Check]:
    fed = [(calls[span.trace_id], span) for span in batch.spans if span.trace_id in calls]
    is_whole = len(fed) == len(batch.spans)
    sampled = [call.trace for call, _ in fed]
    credits_ = [call.credit_of(span) for call, span in fed]
    scored = [credit for credit in credits_ if credit and credit.trainer_logprobs is not None]
    trained = row.get("tokens/trained", 0 if row and not batch.num_tokens else None)
    return [
        Check(
            name="tokens",
            fed=batch.num_tokens,
            stored=sum(len(trace.response_ids) for trace in sampled) if is_whole else None,
            explained="ids with a loss, and the ids sampled for them",
        ),
        Check(name="tokens in metrics", fed=batch.num_tokens, stored=trained, explained="tokens/trained of this step"),
        Check(
            name="sequences with the sampled ids",
            fed=len(audit.sequences),
            stored=sum(item.same_ids is True for item in audit.sequences) if is_whole else None,
            explained="compared id by id",
        ),
        Check(
            name="sequences in the sampled context",
            fed=len(audit.sequences),
            stored=sum(item.same_context is True for item in audit.sequences) if is_whole else None,
            explained="prompts and answers, by their digest",
        ),
        Check(
            name="sum of the sampler's log-probabilities",
            fed=batch.sampler_logprob_sum,
            stored=sum(sum(trace.logprobs) for trace in sampled) if is_whole else None,
            explained="in the batch and in the store",
        ),
        Check(
            name="sum of advantages",
            fed=sum(batch.numbers["advantage"]),
            stored=sum(item.credited for item in audit.sequences) if is_whole else None,
            explained="of each token in the batch, and of each call in the store",
        ),
        Check(
            name="calls with trainer log-probabilities",
            fed=len(batch.spans),
            stored=len(scored) if is_whole else None,
            explained="every fed token was scored by the trainer",
        ),
    ]
