from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.policy import FrozenCopy
from rllm.backends.lora import LoraSettings
from rllm.backends.update import update_weights
from rllm.errors import ConfigError
from rllm.trainer.config import load_config

Make = Callable[..., Any]
ON = ["algorithm.kl_coef=0.1", "optim.lr=0.01"]
KINDS = pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["model.dtype=bfloat16"], marks=pytest.mark.slow),
        ["model.lora_rank=2"],
        pytest.param(["model.reference_offload=true"], marks=pytest.mark.slow),
    ],
    ids=["copy", "in bfloat16", "adapter off", "offloaded"],
)


@pytest.fixture
def open_run(make_model: Make, tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., LocalBackend]]:
    """`open_run("model.lora_rank=2")`: the backend of a run that starts with the model in the folder `start`."""
    folder = tmp_path / "start"
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made: list[LocalBackend] = []

    def open_(*overrides: str) -> LocalBackend:
        made.append(LocalBackend.from_config(load_config([f"model.path={folder}", *ON, *overrides])))
        return made[-1]

    yield open_
    for backend in made:
        backend.close()


@KINDS
def test_reference_equals_the_policy_before_any_update(
    open_run: Callable[..., LocalBackend], groups: Make, overrides: list[str]
) -> None:
    backend, batch = open_run(*overrides), groups()
    assert torch.equal(backend.score_reference(batch), backend.score(batch))


@KINDS
def test_updates_change_the_policy_and_not_the_reference(
    open_run: Callable[..., LocalBackend], groups: Make, overrides: list[str]
) -> None:
    backend, batch = open_run(*overrides), groups()
    original = backend.score(batch)
    learn(backend, batch, original)
    assert torch.equal(backend.score_reference(batch), original), "even if first scored after the update"
    assert (backend.score(batch) - original).abs().max() > 1e-2
    assert torch.equal(backend.score_reference(batch), original), "and a second time"


@KINDS
def test_resumed_run_keeps_its_reference(
    open_run: Callable[..., LocalBackend], groups: Make, overrides: list[str], tmp_path: Path
) -> None:
    first, batch, checkpoint = open_run(*overrides), groups(), tmp_path / "checkpoint"
    original = first.score(batch)
    learn(first, batch, original)
    first.save(checkpoint)
    moved = first.score(batch)
    resumed = open_run(*overrides)
    resumed.load(checkpoint)
    assert torch.equal(resumed.score(batch), moved)
    assert torch.equal(resumed.score_reference(batch), original)
    learn(resumed, batch, original)
    assert torch.equal(resumed.score_reference(batch), original)


def learn(backend: LocalBackend, batch: Batch, reference: Tensor) -> None:
    batch.ref_logprobs = reference
    for _ in range(2):
        update_weights(backend, batch, GRPO(kl_coef=0.1))
        backend.publish()


def test_reference_has_the_dtype_of_the_model_and_no_gradients(
    open_run: Callable[..., LocalBackend], groups: Make
) -> None:
    backend = open_run("model.dtype=bfloat16")
    backend.score_reference(groups())
    assert isinstance(backend.reference, FrozenCopy)
    with backend.reference() as reference:
        weights = list(reference.model.parameters())
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in weights)


def test_nothing_is_loaded_for_an_algorithm_without_a_reference(make_backend: Make, groups: Make) -> None:
    def load() -> Any:
        raise AssertionError("nobody needs it")

    backend = make_backend(load_original=load)
    update_weights(backend, groups(), GRPO())
    backend.publish()


def test_missing_reference_error_names_the_remedy(make_backend: Make, groups: Make) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef"):
        make_backend().score_reference(groups())


def test_reference_of_an_adapter_is_the_model_without_it(make_backend: Make, make_model: Make, groups: Make) -> None:
    batch = groups()
    plain = make_backend(make_model(num_layers=1)).score(batch)
    backend = make_backend(make_model(num_layers=1), lora=LoraSettings(rank=2, alpha=4), lr=1e-2)
    update_weights(backend, batch, GRPO())
    backend.publish()
    torch.testing.assert_close(backend.score_reference(batch), plain, atol=1e-6, rtol=0)
    assert (backend.score(batch) - plain).abs().max() > 1e-2
    assert any(weight.requires_grad for weight in backend.model.parameters()), "the adapter is trained on"


def test_adapter_needs_no_second_model(open_run: Callable[..., LocalBackend]) -> None:
    with pytest.raises(ConfigError, match=r"model\.reference_offload=True"):
        open_run("model.lora_rank=2", "model.reference_offload=true")
