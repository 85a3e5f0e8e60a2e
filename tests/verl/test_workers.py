"""The same batches through verl's workers and through the local backend: the numbers agree to float32 error.

One group of two workers, with a policy, a reference and a critic, serves all of these tests; the last test closes it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import CISPO, DAPO, GRPO, GSPO, DrGRPO
from rllm.algorithms.ppo import PPO
from rllm.algorithms.reinforce import Reinforce
from rllm.algorithms.sft import SFT
from rllm.backends.local.backend import LocalBackend
from rllm.backends.update import update_weights
from rllm.backends.verl.backend import VerlBackend
from rllm.errors import WorkerError
from rllm.trainer.config import load_config

from .batches import batch_for, sequence

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

SETTINGS = [
    "algorithm.name=ppo",
    "algorithm.kl_coef=0.1",
    "model.device=cpu",
    "optim.lr=1e-3",
    "optim.num_minibatches=2",
    "optim.micro_batch_tokens=48",
    "critic.lr=1e-3",
]


@dataclass
class Pair:
    """Two backends of one model."""

    verl: VerlBackend
    local: LocalBackend

    def restart(self, checkpoints: Path) -> None:
        """Restore both to their initial state."""
        self.verl.load(checkpoints / "verl")
        self.local.load(checkpoints / "local")


@pytest.fixture(scope="module")
def pair(cluster: None, model_folder: Path) -> Iterator[Pair]:
    config = load_config([f"model.path={model_folder}", *SETTINGS])
    local = LocalBackend.from_config(config)
    verl = VerlBackend.from_config(
        load_config(config, ["backend=verl", "verl.workers_per_node=2", "verl.timeout_s=1800"])
    )
    yield Pair(verl, local)
    verl.close()
    local.close()


@pytest.fixture(scope="module")
def beginning(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both, before any training."""
    folder = tmp_path_factory.mktemp("beginning")
    batch = batch_for(PPO())
    pair.local.values(batch)  # creates its critic
    for name, backend in (("verl", pair.verl), ("local", pair.local)):
        (folder / name).mkdir()
        backend.save(folder / name)
    return folder


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_agree_with_the_local_backend(pair: Pair, temperature: float) -> None:
    batch = batch_for(GRPO(), temperature=temperature)
    close(pair.verl.score(batch), pair.local.score(batch))
    close(pair.verl.score_reference(batch), pair.local.score_reference(batch))


def test_new_critic_predicts_zero(pair: Pair) -> None:
    batch = batch_for(PPO())
    assert pair.verl.values(batch).tolist() == [0.0] * batch.num_tokens


def test_advantages_agree_with_the_local_backend(pair: Pair) -> None:
    """Advantages are estimated here, from the workers' numbers."""
    batch = batch_for(PPO())
    advantages = []
    for backend in (pair.verl, pair.local):
        scored = replace(batch, old_logprobs=backend.score(batch), values=backend.values(batch))
        advantages.append(PPO(whiten=False).token_advantages(scored)[0])
    close(*advantages)


ALGORITHMS = [
    GRPO(),
    GRPO(kl_coef=0.1, entropy_coef=0.01, correction="truncate", dual_clip=3.0),
    DrGRPO(fixed_length=32),
    GSPO(clip_low=0.2, clip_high=0.2),
    CISPO(),
    DAPO(),
    Reinforce(correction="mask", correction_level="sequence", correction_cap=8.0),
    SFT(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_losses_and_updates_agree_with_the_local_backend(pair: Pair, beginning: Path, algorithm: Algorithm) -> None:
    """Two steps of two updates each: the second update is off-policy."""
    pair.restart(beginning)
    for seed in range(2):
        batch = batch_for(algorithm, seed=seed)
        if algorithm.demonstrated:
            batch = replace(batch, sampler_logprobs=None, advantages=torch.ones(batch.num_tokens))
        if algorithm.needs_reference:
            batch.ref_logprobs = pair.local.score_reference(batch)
        verl, local = (update_weights(backend, batch, algorithm) for backend in (pair.verl, pair.local))
        assert verl.logprobs is not None
        assert local.logprobs is not None
        torch.testing.assert_close(verl.logprobs, local.logprobs, rtol=1e-4, atol=1e-4)
        assert verl.metrics.keys() == local.metrics.keys()
        for name in verl.metrics.keys() - {"tokens/forward", "tokens/shared"}:
            assert verl.metrics[name] == pytest.approx(local.metrics[name], rel=2e-3, abs=2e-4), name
    batch = batch_for(algorithm, seed=5)
    torch.testing.assert_close(pair.verl.score(batch), pair.local.score(batch), rtol=1e-3, atol=1e-3)


def test_sequence_longer_than_a_pass_is_processed_alone(pair: Pair, beginning: Path) -> None:
    pair.restart(beginning)
    long = Batch.of([sequence(random.Random(seed), num_turns) for seed, num_turns in enumerate((1, 9, 2, 7, 1))])
    assert max(len(item.ids) for item in long.sequences) > 48, "optim.micro_batch_tokens"
    batch = replace(long, advantages=torch.ones(long.num_tokens)).with_weights("token-mean", None)
    close(pair.verl.score(batch), pair.local.score(batch))
    verl, local = (
        update_weights(backend, batch, GRPO()).metrics["policy/grad_norm"] for backend in (pair.verl, pair.local)
    )
    assert verl == pytest.approx(local, rel=2e-3)


def test_update_with_non_finite_gradient_is_skipped_and_reported(
    pair: Pair, beginning: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair.restart(beginning)
    batch = batch_for(GRPO())
    before = pair.verl.score(batch)
    assert batch.advantages is not None
    update_weights(pair.verl, replace(batch, advantages=batch.advantages * float("nan")), GRPO())
    assert "norm nan" in caplog.text
    assert torch.equal(pair.verl.score(batch), before)


def test_verl_policy_loss_replaces_ours(pair: Pair, beginning: Path) -> None:
    """Its `vanilla` is PPO's, with a dual clip; so ours is the same if that is set."""
    algorithm = GRPO(
        kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0, correction="truncate", aggregation="seq-mean-token-mean"
    )
    config = pair.verl._config
    pair.verl._config = load_config(config, ["verl.policy_loss=vanilla"])
    try:
        pair.restart(beginning)
        pair.verl._learns_with = None
        for seed in range(2):
            batch = batch_for(algorithm, seed=seed)
            batch.ref_logprobs = pair.local.score_reference(batch)
            verl, local = (update_weights(backend, batch, algorithm).metrics for backend in (pair.verl, pair.local))
            for name in ("policy/loss", "policy/grad_norm", "policy/kl", "policy/entropy"):
                assert verl[name] == pytest.approx(local[name], rel=2e-3, abs=2e-4), name
            assert "policy/pg_clipfrac" in verl
    finally:
        pair.verl._config, pair.verl._learns_with = config, None


def test_critic_losses_and_updates_agree_with_the_local_backend(pair: Pair, beginning: Path) -> None:
    pair.restart(beginning)
    algorithm = PPO(kl_coef=0.1)
    for seed in range(3):
        metrics, values = [], []
        for backend in (pair.verl, pair.local):
            batch = batch_for(algorithm, seed=seed)
            batch.old_logprobs, batch.values = backend.score(batch), backend.values(batch)
            batch.ref_logprobs = backend.score_reference(batch)
            batch.advantages, batch.returns = algorithm.token_advantages(batch)
            metrics.append(update_weights(backend, batch, algorithm).metrics)
            values.append(backend.values(batch))
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)
        for name in (
            "critic/loss",
            "critic/error",
            "critic/grad_norm",
            "critic/value",
            "policy/loss",
            "policy/grad_norm",
        ):
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=5e-3, abs=5e-4), name


def test_published_weights_are_the_trained_ones(pair: Pair, beginning: Path) -> None:
    pair.restart(beginning)
    batch = batch_for(GRPO())
    update_weights(pair.verl, batch, GRPO())
    version = pair.verl.weight_version
    assert (pair.verl.publish(), pair.verl.weight_version) == (version + 1, version + 1)
    sampled: Any = pair.verl.inference
    assert sampled.weight_version == version + 1
    with torch.no_grad():
        for sequence, logprobs in zip(batch.sequences, by_sequence(pair.verl.score(batch), batch), strict=True):
            logits = sampled.model(torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
            answer = torch.stack([logits[place - 1, sequence.ids[place]] for place in sequence.sampled_positions()])
            close(answer, logprobs)


def by_sequence(values: Tensor, batch: Batch) -> list[Tensor]:
    return list(values.split(torch.bincount(batch.sequence_of).tolist()))


def test_checkpoint_is_an_ordinary_folder_and_resumes_exactly(pair: Pair, beginning: Path, tmp_path: Path) -> None:
    pair.restart(beginning)
    batch = batch_for(GRPO())
    update_weights(pair.verl, batch, GRPO())
    pair.verl.save(tmp_path)
    before = pair.verl.score(batch)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(saved).__name__ == "Qwen3ForCausalLM"
    published = dict(pair.verl._weights())
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(weight, published[name], rtol=0, atol=0)
    first = update_weights(pair.verl, batch, GRPO()).metrics
    after = pair.verl.score(batch)
    pair.verl.load(tmp_path)
    assert torch.equal(pair.verl.score(batch), before)
    assert update_weights(pair.verl, batch, GRPO()).metrics == first
    assert torch.equal(pair.verl.score(batch), after)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(GRPO):
    """Algorithm whose loss allocates more memory than there is."""

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_out_of_memory_error_names_the_node_and_the_remedies(pair: Pair) -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
    with pytest.raises(WorkerError, match=r"on node [\d.]+ ran out of memory.*optim.micro_batch_tokens"):
        update_weights(pair.verl, batch_for(GRPO()), OutOfMemory())


def test_worker_timeout_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.verl._group, "_timeout_s", 0.001)
    with pytest.raises(WorkerError, match=r"verl\.timeout_s"):
        pair.verl.score(batch_for(GRPO()))
    monkeypatch.undo()
    assert len(pair.verl.score(batch_for(GRPO()))), "a later call succeeds"


def test_dead_worker_error_names_its_node(pair: Pair) -> None:
    import ray

    worker = pair.verl._group._group.workers[0]
    os.kill(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"on node [\d.]+ died"):
        pair.verl.score(batch_for(GRPO()))
