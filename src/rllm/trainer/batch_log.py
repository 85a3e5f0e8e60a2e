"""Batches of the optimizer, one file per step: `batches/step-000001.json`, which `rllm view` reads.

Token ids and per-token numbers are little-endian arrays, compressed and base64-encoded. Prompts are not repeated: a
digest of each whole sequence shows whether it equals the stored one.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from rllm._runtime.files import replace_text
from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, TokenSequence
from rllm.backends.base import UpdateResult
from rllm.types import JSONObject

logger = logging.getLogger(__name__)

FOLDER = "batches"
_NAME = re.compile(r"step-(\d+)\.json")
_SHORT = torch.float16
"""Three significant digits, enough for display."""


class BatchLog:
    """Batch files of a run. Files of steps that a resumed run repeats are deleted."""

    def __init__(self, run_dir: Path, *, steps_done: int, keep: int | None = None) -> None:
        """Delete batches of later steps, and all but the newest `keep`; `None` keeps all, 0 writes none."""
        self._folder = run_dir / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._keep = keep
        for step, path in self._kept():
            if step > steps_done:
                path.unlink()
        self._forget_oldest()

    def write(self, step: int, batch: Batch, update: UpdateResult, algorithm: Algorithm) -> None:
        """Write one batch. A file that cannot be written is only logged, so that training continues."""
        if self._keep == 0:
            return
        try:
            replace_text(
                self._folder / f"step-{step:06d}.json", json.dumps(_batch_record(step, batch, update, algorithm))
            )
            self._forget_oldest()
        except OSError as error:
            logger.warning("the batch of step %d cannot be stored for `rllm view`: %s", step, error)

    def _kept(self) -> list[tuple[int, Path]]:
        """Return the steps and their files, oldest first; names stop sorting by step at a million steps."""
        found = [(match, path) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in found)

    def _forget_oldest(self) -> None:
        if self._keep is not None:
            for _, path in self._kept()[::-1][self._keep :]:
                path.unlink(missing_ok=True)


def _batch_record(step: int, batch: Batch, update: UpdateResult, algorithm: Algorithm) -> JSONObject:
    clips_tokens = type(algorithm).surrogate is Algorithm.surrogate
    numbers = {
        "advantage": (batch.advantages, torch.float32),
        "weight": (batch.weights, torch.float32),
        "entropy": (update.entropies, _SHORT),
        "ratio": (update.ratios, _SHORT),
    }
    return {
        "step": step,
        "algorithm": type(algorithm).__name__,
        "clip": [1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high] if clips_tokens else None,
        "num_tokens": batch.num_tokens,
        "sampler_logprob_sum": None if batch.sampler_logprobs is None else float(batch.sampler_logprobs.double().sum()),
        "sequences": [_sequence(sequence) for sequence in batch.sequences],
        "ids": _packed(batch.ids.to(torch.int32)),
        "tokens": {name: _packed(values.to(kind)) for name, (values, kind) in numbers.items() if values is not None},
    }


def _sequence(sequence: TokenSequence) -> JSONObject:
    ids = torch.tensor(sequence.ids, dtype=torch.int32).numpy().astype("<i4").tobytes()
    return {
        "length": len(sequence.ids),
        "digest": sha256(ids).hexdigest()[:16],
        "spans": [[span.step_id, span.start, span.stop] for span in sequence.spans],
    }


def _packed(values: Tensor) -> dict[str, str]:
    """Return an array with its kind, as NumPy writes it: `i4`, `f4` or `f2`."""
    array = values.detach().cpu().numpy()
    kind = f"{array.dtype.kind}{array.dtype.itemsize}"
    data = array.astype(f"<{kind}").tobytes()
    return {"kind": kind, "data": b64encode(zlib.compress(data, 6)).decode()}
