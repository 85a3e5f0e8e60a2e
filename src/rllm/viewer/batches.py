"""Batches of a run's optimizer, as `rllm.trainer.batch_log` writes them, and their audit against the store."""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from rllm._runtime.untrusted import read_json, unpack_zlib
from rllm.capture.side_calls import side_calls
from rllm.errors import StoreError
from rllm.parser.append_only import common_length
from rllm.types import JSONMapping, StepCredit, Trace, credits_by_trace, grouped
from rllm.viewer.charts import Row
from rllm.viewer.rollouts import StoredRollout

_KINDS = {"i4": "i", "f4": "f", "f2": "e"}
_MAX_FILE_BYTES = 512 * 1024 * 1024
_MAX_ARRAY_BYTES = 64 * 1024 * 1024
"""16 million tokens: four times the batches of the largest runs."""


@dataclass(frozen=True, kw_only=True)
class FedSpan:
    """Tokens of one call in a batch."""

    trace_id: str
    place: int
    """Number of earlier sequences with the same call, which trajectories may share."""
    tokens: slice
    """Position among all tokens of the batch."""


@dataclass(frozen=True, kw_only=True)
class FedSequence:
    """One sequence: prompts, sampled and inserted tokens in order."""

    length: int
    digest: str
    spans: Sequence[FedSpan]


@dataclass(frozen=True, kw_only=True)
class FedBatch:
    """Batch of one step."""

    step: int
    algorithm: str
    clip: tuple[float, float] | None
    """Bounds of the ratio within which no token is clipped; `None` if the algorithm does not clip single tokens."""
    sampler_logprob_sum: float | None
    sequences: Sequence[FedSequence]
    ids: Sequence[int]
    numbers: Mapping[str, Sequence[float]]
    """Values of every token, by name: `advantage`, `weight`, and if known `entropy` and `ratio`."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def spans(self) -> list[FedSpan]:
        return [span for sequence in self.sequences for span in sequence.spans]

    @cached_property
    def by_trace(self) -> dict[str, list[FedSpan]]:
        """Spans by the call that sampled them."""
        return grouped((span.trace_id, span) for span in self.spans)


def read_batch(folder: Path, step: int) -> FedBatch | None:
    """Read the batch of a step; `None` if the run kept none."""
    path = folder / "batches" / f"step-{step:06d}.json"
    try:
        record = read_json(path, limit=_MAX_FILE_BYTES)
        ids = _unpacked(record["ids"])
        if len(ids) != record["num_tokens"]:
            raise ValueError(f"{len(ids)} ids for {record['num_tokens']} tokens")
        return FedBatch(
            **{name: record[name] for name in ("step", "algorithm", "clip", "sampler_logprob_sum")},
            sequences=sequences_of(record["sequences"]),
            ids=ids,
            numbers={name: _unpacked(packed) for name, packed in record["tokens"].items()},
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, zlib.error, struct.error) as error:
        raise StoreError(
            f"{str(path)!r} is not a batch of this version ({error}): delete it; other files are not affected"
        ) from error


def sequences_of(records: Sequence[JSONMapping]) -> list[FedSequence]:
    """Return the sequences of a batch with the places of their tokens."""
    found, place = [], 0
    fed: Counter[str] = Counter()
    for record in records:
        spans = []
        for trace_id, start, stop in record["spans"]:
            tokens = slice(place, place + stop - start)
            spans.append(FedSpan(trace_id=trace_id, place=fed[trace_id], tokens=tokens))
            fed[trace_id] += 1
            place = tokens.stop
        found.append(FedSequence(length=record["length"], digest=record["digest"], spans=spans))
    return found


def advantages_in(folder: Path) -> Callable[[int, str], list[list[float]]]:
    """Return a function from training step and call to its tokens' advantages, in each sequence that holds it.

    It returns nothing for steps without a batch; see `rllm.viewer.explain.Fed`.
    """
    batch_of = cache(partial(read_batch, folder))

    def of(training_step: int, trace_id: str) -> list[list[float]]:
        batch = batch_of(training_step + 1)
        if batch is None:
            return []
        return [list(batch.numbers["advantage"][span.tokens]) for span in batch.by_trace.get(trace_id, [])]

    return of


def digest_of(ids: Sequence[int]) -> str:
    """Return the digest that identifies a whole sequence."""
    return sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()[:16]


def _unpacked(packed: Mapping[str, str]) -> Sequence[Any]:
    raw = unpack_zlib(b64decode(packed["data"]), limit=_MAX_ARRAY_BYTES)
    kind = _KINDS[packed["kind"]]
    if kind == "e":
        return array("f", (number for (number,) in struct.iter_unpack("<e", raw)))
    return array(kind, raw)


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
    rollout: StoredRollout | None = None
    role: str = ""
    num_fed: int = 0
    num_sampled: int = 0
    same_ids: bool | None = None
    """True if the trained ids are the sampled ones; `None` if the store has lost them."""
    same_context: bool | None = None
    """True if the whole sequence, prompts included, is the last call's."""
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
    trace: Trace
    credits: Sequence[StepCredit]
    """Credits of this step, in the order of the trajectories that share the call."""
    rollout: StoredRollout
    is_side_call: bool

    def credit_of(self, span: FedSpan) -> StepCredit | None:
        """Return the credit of a span; a batch has the trajectories that share a call in the order of the credits."""
        scored = [credit for credit in self.credits if credit.trainer_logprobs is not None] or self.credits
        return scored[min(span.place, len(scored) - 1)] if scored else None


def audit_batch(batch: FedBatch, rollouts: Sequence[StoredRollout], calls_of: Calls, row: Row) -> BatchAudit:
    """Compare a step's batch with the rollouts that the store has of it."""
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
    audit.sequences = [_compared(number, sequence, batch, calls) for number, sequence in enumerate(batch.sequences)]
    audit.left_out = _left_out(batch, calls)
    audit.checks = _checks(batch, audit, calls, row)
    return audit


def _compared(number: int, sequence: FedSequence, batch: FedBatch, calls: Mapping[str, _StoredCall]) -> CheckedSequence:
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
            place = common_length(fed, trace.response_ids)
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
        reason = next((credit.dropped for credit in call.credits if credit.dropped), None)
        if reason is None:
            uncredited = "no advantage" if call.credits else "side call" if call.is_side_call else "not in a trajectory"
            reason = "failed" if call.rollout.error else uncredited
        counts[reason] += 1
        tokens[reason] += len(call.trace.response_ids)
    return [(reason.replace("_", " "), count, tokens[reason]) for reason, count in counts.most_common()]


def _checks(batch: FedBatch, audit: BatchAudit, calls: Mapping[str, _StoredCall], row: Row) -> list[Check]:
    fed = [(calls[span.trace_id], span) for span in batch.spans if span.trace_id in calls]
    is_whole = len(fed) == len(batch.spans)
    sampled = [call.trace for call, _ in fed]
    credits_ = [call.credit_of(span) for call, span in fed]
    num_scored = sum(credit is not None and credit.trainer_logprobs is not None for credit in credits_)
    num_sampled, num_sequences = sum(len(trace.response_ids) for trace in sampled), len(audit.sequences)
    same_ids = sum(item.same_ids is True for item in audit.sequences)
    same_context = sum(item.same_context is True for item in audit.sequences)
    logprobs = sum(sum(trace.logprobs) for trace in sampled)
    credited = sum(item.credited for item in audit.sequences)
    trained = row.get("tokens/trained", 0 if row and not batch.num_tokens else None)

    def check(name: str, fed: float | None, stored: float | None, explained: str) -> Check:
        return Check(name=name, fed=fed, stored=stored if is_whole else None, explained=explained)

    return [
        check("tokens", batch.num_tokens, num_sampled, "ids with a loss, and the ids sampled for them"),
        Check(name="tokens in metrics", fed=batch.num_tokens, stored=trained, explained="tokens/trained of this step"),
        check("sequences with the sampled ids", num_sequences, same_ids, "compared id by id"),
        check("sequences in the sampled context", num_sequences, same_context, "prompts and answers, by their digest"),
        check(
            "sum of the sampler's log-probabilities",
            batch.sampler_logprob_sum,
            logprobs,
            "in the batch and in the store",
        ),
        check(
            "sum of advantages",
            sum(batch.numbers["advantage"]),
            credited,
            "of each token in the batch, and of each call in the store",
        ),
        check(
            "calls with trainer log-probabilities",
            len(batch.spans),
            num_scored,
            "every fed token was scored by the trainer",
        ),
    ]
