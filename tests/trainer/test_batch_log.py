"""Files with the input of the optimizer."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from pathlib import Path

import numpy
import pytest
import torch

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import GRPO, GSPO
from rllm.backends.base import UpdateResult
from rllm.trainer.batch_log import BatchLog

from .conftest import RunTrainer


def array(packed):
    return numpy.frombuffer(zlib.decompress(b64decode(packed["data"])), f"<{packed['kind']}").tolist()


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "batches").iterdir())


@pytest.fixture
def batch() -> Batch:
    first = TokenSequence(ids=[7, 8, 9], spans=[StepSpan(step_id="a", start=1, stop=3)], logprobs=[-0.5, -1.5])
    second = TokenSequence(ids=[7, 70_000], spans=[StepSpan(step_id="b", start=1, stop=2)], logprobs=[-2.0])
    made = Batch.of([first, second])
    made.advantages = torch.tensor([1.0, 1.0, -1.0])
    return made


def test_file_has_every_token_with_its_numbers(tmp_path: Path, batch: Batch) -> None:
    update = UpdateResult(entropies=torch.tensor([0.5, 0.25, 2.0]), ratios=torch.tensor([1.0, 1.5, 1.0]))
    BatchLog(tmp_path, steps_done=0).write(1, batch, update, GRPO())
    output = json.loads((tmp_path / "batches/step-000001.json").read_text())
    assert array(output["ids"]) == [8, 9, 70_000]
    assert array(output["tokens"]["advantage"]) == [1.0, 1.0, -1.0]
    assert array(output["tokens"]["entropy"]) == [0.5, 0.25, 2.0]
    assert array(output["tokens"]["ratio"]) == [1.0, 1.5, 1.0]
    assert array(output["tokens"]["weight"]) == pytest.approx([1 / 3] * 3)
    assert [sequence["spans"] for sequence in output["sequences"]] == [[["a", 1, 3]], [["b", 1, 2]]]
    assert (output["num_tokens"], output["sampler_logprob_sum"], output["clip"]) == (3, -4.0, [0.8, 1.2])


def test_clipping_is_recorded_for_algorithms_that_clip_tokens(tmp_path: Path, batch: Batch) -> None:
    BatchLog(tmp_path, steps_done=0).write(1, batch, UpdateResult(), GSPO())
    output = json.loads((tmp_path / "batches/step-000001.json").read_text())
    assert (output["clip"], "ratio" in output["tokens"]) == (None, False)


def test_batches_of_repeated_steps_are_removed(tmp_path: Path, batch: Batch) -> None:
    log = BatchLog(tmp_path, steps_done=0)
    for step in (1, 2, 3):
        log.write(step, batch, UpdateResult(), GRPO())
    BatchLog(tmp_path, steps_done=2)
    assert names_in(tmp_path) == ["step-000001.json", "step-000002.json"]


def test_steps_above_a_million_sort_later(tmp_path: Path, batch: Batch) -> None:
    log = BatchLog(tmp_path, steps_done=0)
    for step in (999_999, 1_000_000, 1_000_001):
        log.write(step, batch, UpdateResult(), GRPO())
    BatchLog(tmp_path, steps_done=1_000_000)
    assert names_in(tmp_path) == ["step-1000000.json", "step-999999.json"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, [999_998, 999_999, 1_000_000]),
        (5, [999_998, 999_999, 1_000_000]),
        (2, [999_999, 1_000_000]),
        (1, [1_000_000]),
        (0, []),
    ],
)
def test_configured_number_of_newest_batches_is_kept(
    tmp_path: Path, batch: Batch, keep: int | None, left: list[int]
) -> None:
    log = BatchLog(tmp_path, steps_done=0, keep=keep)
    for step in (999_998, 999_999, 1_000_000):
        log.write(step, batch, UpdateResult(), GRPO())
    assert names_in(tmp_path) == sorted(f"step-{step}.json" for step in left)


def test_resumed_run_that_keeps_fewer_batches_removes_the_others(tmp_path: Path, batch: Batch) -> None:
    log = BatchLog(tmp_path, steps_done=0)
    for step in (1, 2, 3):
        log.write(step, batch, UpdateResult(), GRPO())
    BatchLog(tmp_path, steps_done=3, keep=1)
    assert names_in(tmp_path) == ["step-000003.json"]


def test_run_keeps_every_batch(run_trainer: RunTrainer) -> None:
    run = run_trainer()
    for step, trained in enumerate(run.backend.batches, start=1):
        output = json.loads((run.trainer.run_dir / f"batches/step-{step:06d}.json").read_text())
        assert array(output["ids"]) == trained.ids.tolist()
