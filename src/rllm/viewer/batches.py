"""Batches of a run's optimiser, from the files that `rllm.trainer.batch_log` writes."""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from rllm._runtime.untrusted import read_json, unpack_zlib
from rllm.errors import StoreError

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
    sequence: int
    start: int
    """Position of the first token in its sequence."""
    tokens: slice
    """Position among all tokens of the batch."""


@dataclass(frozen=True, kw_only=True)
class FedSequence:
    """One sequence: prompts, sampled and inserted tokens in order."""

    length: int
    digest: str
    spans: Sequence[FedSpan]


@dataclass(frozen=True)
class FedBatch:
    """Batch of one step."""

    data: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.data["step"])

    @property
    def algorithm(self) -> str:
        return str(self.data["algorithm"])

    @property
    def clip(self) -> tuple[float, float] | None:
        """Bounds of the ratio within which no token is clipped; `None` if the algorithm does not clip single tokens."""
        clip = self.data.get("clip")
        return None if clip is None else (float(clip[0]), float(clip[1]))

    @property
    def num_tokens(self) -> int:
        return int(self.data["num_tokens"])

    @property
    def sampler_logprob_sum(self) -> float | None:
        found = self.data.get("sampler_logprob_sum")
        return None if found is None else float(found)

    @cached_property
    def ids(self) -> Sequence[int]:
        return _unpacked(self.data["ids"])

    @cached_property
    def numbers(self) -> dict[str, Sequence[float]]:
        """Values of every token, by name: `advantage`, `weight`, and if known `entropy`, `ratio`, ..."""
        return {name: _unpacked(packed) for name, packed in self.data["tokens"].items()}

    @cached_property
    def sequences(self) -> list[FedSequence]:
        found, place = [], 0
        fed: Counter[str] = Counter()
        for number, sequence in enumerate(self.data["sequences"]):
            spans = []
            for trace_id, start, stop in sequence["spans"]:
                tokens = slice(place, place + stop - start)
                spans.append(
                    FedSpan(trace_id=trace_id, place=fed[trace_id], sequence=number, start=start, tokens=tokens)
                )
                fed[trace_id] += 1
                place = tokens.stop
            found.append(FedSequence(length=sequence["length"], digest=sequence["digest"], spans=spans))
        return found

    @cached_property
    def spans(self) -> list[FedSpan]:
        return [span for sequence in self.sequences for span in sequence.spans]

    @cached_property
    def by_trace(self) -> dict[str, list[FedSpan]]:
        """Spans by the call that sampled them."""
        found: dict[str, list[FedSpan]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id, []).append(span)
        return found


def read_batch(folder: Path, step: int) -> FedBatch | None:
    """Read the batch of a step; `None` if the run kept none.

    Raises:
        StoreError: if the file is damaged.
    """
    path = folder / "batches" / f"step-{step:06d}.json"
    try:
        batch = FedBatch(read_json(path, limit=_MAX_FILE_BYTES))
        if len(batch.ids) != batch.num_tokens or len(batch.sequences) != len(batch.data["sequences"]):
            raise ValueError(f"{len(batch.ids)} ids for {batch.num_tokens} tokens")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, zlib.error, struct.error) as error:
        raise StoreError(
            f"{str(path)!r} is not a batch of this version ({error}): delete it; other files are not affected"
        ) from error
    return batch


def advantages_in(folder: Path) -> Callable[[int, str], list[list[float]]]:
    """Return a function from training step and call to its tokens' advantages, in each sequence that holds it.

    It returns nothing for steps without a batch; see `rllm.trainer.explain.Fed`.
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


def _unpacked(packed: Mapping[str, str]) -> array[Any]:
    raw = unpack_zlib(b64decode(packed["data"]), limit=_MAX_ARRAY_BYTES)
    kind = _KINDS[packed["kind"]]
    if kind == "e":
        return array("f", (number for (number,) in struct.iter_unpack("<e", raw)))
    values = array(kind, raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
