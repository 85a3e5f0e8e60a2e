"""An adapter trained by verl's workers: its reference, its published weights, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.backends.update import update_weights
from rllm.backends.verl.backend import VerlBackend
from rllm.inference.local.loading import load_model
from rllm.trainer.config import load_config

from .batches import batch_for

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def backend(cluster: None, model_folder: Path) -> Iterator[VerlBackend]:
    settings = [
        "model.lora_rank=4",
        "model.device=cpu",
        "optim.lr=1e-2",
        "algorithm.kl_coef=0.1",
        "verl.timeout_s=1800",
    ]
    backend = VerlBackend.from_config(load_config(["backend=verl", f"model.path={model_folder}", *settings]))
    yield backend
    backend.close()


def logprobs_of(model: Any, batch: Batch) -> Tensor:
    """Return [N] by a plain forward pass of each sequence."""
    answer = []
    with torch.no_grad():
        for sequence in batch.sequences:
            logits = model(torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
            answer += [logits[place - 1, sequence.ids[place]] for place in sequence.sampled_positions()]
    return torch.stack(answer)


def test_adapter_is_trained_and_the_reference_is_unchanged(
    backend: VerlBackend, model_folder: Path, tmp_path: Path
) -> None:
    batch, algorithm = batch_for(GRPO()), GRPO(kl_coef=0.1)
    batch.ref_logprobs = backend.score_reference(batch)
    assert torch.equal(backend.score(batch), batch.ref_logprobs), "a new adapter changes nothing"
    update_weights(backend, batch, algorithm)
    learnt = backend.score(batch)
    assert (learnt - batch.ref_logprobs).abs().max() > 0.01
    assert torch.equal(backend.score_reference(batch), batch.ref_logprobs)

    backend.publish()
    engine: Any = backend.inference
    torch.testing.assert_close(logprobs_of(engine.model, batch), learnt, rtol=0, atol=1e-5)
    assert torch.equal(backend.score(batch), learnt), "merging the adapter for a publish leaves the weights unchanged"

    backend.save(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    pieces = sum(path.stat().st_size for path in (tmp_path / "verl").rglob("model_*.pt"))
    assert pieces < 0.5 * (model_folder / "model.safetensors").stat().st_size, "frozen weights are not saved"
    saved = load_model(tmp_path, dtype="float32", device="cpu").model
    torch.testing.assert_close(logprobs_of(saved, batch), learnt, rtol=0, atol=1e-5)
    update_weights(backend, batch, algorithm)
    twice = backend.score(batch)
    backend.load(tmp_path)
    assert torch.equal(backend.score(batch), learnt)
    update_weights(backend, batch, algorithm)
    assert torch.equal(backend.score(batch), twice)
