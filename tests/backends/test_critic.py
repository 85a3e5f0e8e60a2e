from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.algorithms.batch import Batch
from rllm.algorithms.ppo import PPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.critic import FILE
from rllm.backends.lora import LoraSettings
from rllm.backends.update import explained_variance, update_weights
from rllm.config.schema import CriticConfig
from rllm.errors import ConfigError

from .conftest import in_float64, same_weights, sequence_of, weights_of

Make = Callable[..., Any]
MakeBackend = Callable[..., LocalBackend]
FAST = CriticConfig(lr=1e-2)


def judged(backend: LocalBackend, batch: Batch, *, returns: float | None = None) -> Batch:
    """Return the batch with the critic's values, and returns: the same everywhere, or 1 for three sequences, then -1, ..."""
    batch.values = backend.values(batch)
    signs = 1.0 - 2.0 * (batch.sequence_of // 3 % 2)
    batch.returns = signs if returns is None else torch.full_like(batch.values, returns)
    return batch


def test_untrained_critic_predicts_zero(make_backend: MakeBackend, groups: Make) -> None:
    batch: Batch = groups()
    assert make_backend().values(batch).tolist() == [0.0] * batch.num_tokens
    assert make_backend().values(Batch.of([])).tolist() == []


def test_critic_learns_the_returns(make_backend: MakeBackend, groups: Make) -> None:
    backend = make_backend(critic=FAST)
    batch: Batch = groups(2, 3)
    losses = []
    for _ in range(12):
        losses.append(update_weights(backend, judged(backend, batch), PPO(value_clip=None)).metrics["critic/loss"])
    assert losses[0] == pytest.approx(0.25), "0.5 * value_coef * (0 - 1)²"
    assert losses[-1] < 0.1 * losses[0]
    metrics = update_weights(backend, judged(backend, batch), PPO(value_clip=None)).metrics
    assert metrics["critic/explained_variance"] > 0.9
    assert metrics["critic/return"] == pytest.approx(float(batch.returns.mean()))  # type: ignore[union-attr]
    assert metrics["critic/grad_norm"] > 0


def test_values_do_not_depend_on_the_next_token(make_backend: MakeBackend, groups: Make) -> None:
    backend = make_backend(critic=FAST)
    for _ in range(3):
        update_weights(backend, judged(backend, groups()), PPO())
    prompt = list(range(3, 30))
    one, other = backend.values(Batch.of([sequence_of(prompt, [40, 41]), sequence_of(prompt, [50, 41])])).view(2, 2)
    assert one[0] == other[0] != 0
    assert (one[1] - other[1]).abs() > 1e-4, "the next value depends on the chosen token"


@pytest.mark.parametrize(
    ("dtype", "tolerance", "value_clip"),
    [(torch.float32, 1e-5, None), (torch.float64, 1e-10, 0.2)],
    ids=str,
)
def test_micro_batches_do_not_change_the_gradient(
    make_backend: MakeBackend,
    make_model: Make,
    groups: Make,
    dtype: torch.dtype,
    tolerance: float,
    value_clip: float | None,
) -> None:
    batch: Batch = groups(2, 7).with_weights("seq-mean-token-mean")
    limits = {len(list(batch.split(limit))): limit for limit in range(200)}
    found = {}
    for pieces in (1, 7):
        model = make_model() if dtype == torch.float32 else in_float64(make_model())
        backend = make_backend(model, micro_batch_tokens=limits[pieces])
        with torch.no_grad():
            backend.critic._head.weight.normal_(generator=torch.Generator().manual_seed(0))
        judged(backend, batch)
        assert batch.values is not None
        batch.values = batch.values + torch.linspace(-1, 1, batch.num_tokens)
        backend.critic.accumulate(batch, PPO(value_clip=value_clip))
        weights = backend.critic._module.parameters()
        found[pieces] = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        assert found[pieces].dtype == dtype
    assert (found[7] - found[1]).norm() <= tolerance * found[1].norm()


def test_policy_is_unchanged_during_critic_warmup(make_backend: MakeBackend, groups: Make) -> None:
    backend = make_backend(lr=1e-2, critic=CriticConfig(lr=1e-2, warmup_steps=2))
    batch: Batch = groups()
    before, scored = weights_of(backend.model), backend.score(batch)
    for _ in range(2):
        result = update_weights(backend, judged(backend, batch), PPO())
        assert result.metrics["optim/num_updates"] == 0
        assert result.metrics["critic/loss"] > 0
        assert result.logprobs is not None
        torch.testing.assert_close(result.logprobs, scored)
        backend.publish()
        assert same_weights(before, weights_of(backend.model))
    assert update_weights(backend, judged(backend, batch), PPO()).metrics["optim/num_updates"] == 1
    assert not same_weights(before, weights_of(backend.model))


@pytest.mark.parametrize(("bound", "moves"), [(1e-12, False), (1.0, True)])
def test_critic_has_its_own_gradient_bound(make_backend: MakeBackend, groups: Make, bound: float, moves: bool) -> None:
    """AdamW normalizes gradients of any scale, except for those below its epsilon of 1e-8."""
    backend = make_backend(critic=CriticConfig(lr=1e-2, max_grad_norm=bound))
    batch = judged(backend, groups(2, 2), returns=3.0)
    update_weights(backend, batch, PPO(value_clip=None))
    backend.publish()
    assert bool(backend.values(batch).abs().max() > 1e-3) is moves


def test_minibatches_and_epochs_apply_to_the_critic(make_backend: MakeBackend, groups: Make) -> None:
    backend = make_backend(critic=FAST, num_minibatches=2, num_epochs=3)
    batch: Batch = judged(backend, groups(2, 2), returns=3.0)
    metrics = update_weights(backend, batch, PPO(value_clip=None)).metrics
    assert metrics["optim/num_updates"] == 6
    assert 0 < metrics["critic/loss"] < 0.25 * 9, "the critic improves between updates"
    assert 0 < metrics["critic/value"] < 3, "the mean over all updates"


def test_resumed_run_continues_bit_for_bit(
    make_backend: MakeBackend, make_model: Make, groups: Make, tmp_path: Path
) -> None:
    settings = CriticConfig(lr=1e-3, warmup_steps=2)
    one, other = (make_backend(make_model(seed=seed), lr=1e-3, critic=settings) for seed in range(2))
    for seed in range(2):
        update_weights(one, judged(one, groups(seed=seed)), PPO())
        one.publish()
    one.save(tmp_path)
    assert (tmp_path / FILE).exists()
    other.load(tmp_path)
    last = [update_weights(backend, judged(backend, groups(seed=2)), PPO()).metrics for backend in (one, other)]
    assert last[0] == last[1]
    assert last[0]["optim/num_updates"] == 1, "the warm-up is not repeated"
    assert torch.equal(one.values(groups()), other.values(groups()))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def test_damaged_critic_is_rejected(make_backend: MakeBackend, groups: Make, tmp_path: Path) -> None:
    backend = make_backend()
    update_weights(backend, judged(backend, groups()), PPO())
    backend.save(tmp_path)
    for damage in (cut, Path.unlink):
        damage(tmp_path / FILE)
        with pytest.raises(ConfigError, match="checkpoint="):
            backend.load(tmp_path)


def test_checkpoint_without_critic_removes_an_older_critic(
    make_backend: MakeBackend, groups: Make, tmp_path: Path
) -> None:
    backend = make_backend(critic=FAST)
    backend.save(tmp_path)
    for _ in range(2):
        update_weights(backend, judged(backend, groups()), PPO())
    backend.load(tmp_path)
    assert not backend.values(groups()).any(), "a new critic predicts 0"


@pytest.mark.slow
def test_critic_has_its_own_adapter(make_backend: MakeBackend, make_model: Make, groups: Make, tmp_path: Path) -> None:
    lora = LoraSettings(rank=2, alpha=4)
    one, other = (make_backend(make_model(), lora=lora, lr=1e-3, critic=FAST) for _ in range(2))
    for _ in range(2):
        update_weights(one, judged(one, groups()), PPO())
        one.publish()
    trained = one.critic._trained()
    assert set(trained) >= {"head.weight", "head.bias"}
    assert all(".lora_" in name for name in trained if not name.startswith("head."))
    one.save(tmp_path)
    other.load(tmp_path)
    assert torch.equal(one.values(groups()), other.values(groups()))


def test_explained_variance_matches_hand_computed_values() -> None:
    returns = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(4), returns) == 0.0
    assert explained_variance(0.5 * returns, returns) == 0.75
    assert explained_variance(torch.zeros(4), torch.ones(4)) == 0.0, "constant returns have no variance to explain"
