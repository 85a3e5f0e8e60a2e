from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Aggregation, Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.m2po import M2PO
from rllm.backends.local.backend import RECOVERY_FILE, LocalBackend
from rllm.backends.update import update_weights
from rllm.errors import ConfigError, WeightSyncError

from .conftest import assert_rejects_damage, in_float64, same_weights, sequence_of, weights_of

Make = Callable[..., Any]
MakeBackend = Callable[..., LocalBackend]


LOSSES: dict[str, Algorithm] = {
    "plain": GRPO(),
    "entropy": GRPO(entropy_coef=0.3),
    "divergence": GRPO(kl_coef=0.5),
    "correction": GRPO(correction="truncate", correction_level="sequence", correction_cap=1.1),
}


def gradient(backend: LocalBackend, batch: Batch, algorithm: Algorithm = LOSSES["plain"]) -> Tensor:
    """Return the flattened gradient that an update on this batch would use."""
    backend.accumulate(batch, algorithm)
    found = [weight.grad.flatten() for weight in backend.model.parameters() if weight.grad is not None]
    backend.model.zero_grad()
    return torch.cat(found)


@pytest.mark.parametrize(
    ("loss", "dtype", "tolerance"),
    [("plain", torch.float32, 1e-5), *((loss, torch.float64, 1e-10) for loss in LOSSES)],
    ids=str,
)
def test_micro_batches_do_not_change_the_gradient(
    make_backend: MakeBackend,
    make_model: Make,
    groups: Make,
    loss: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    batch: Batch = groups(2, 7).with_weights("seq-mean-token-mean")
    limits = {len(list(batch.split(limit))): limit for limit in range(200)}
    models = [make_model() if dtype == torch.float32 else in_float64(make_model()) for _ in range(2)]
    whole, parts = (make_backend(model, micro_batch_tokens=limits[n]) for model, n in zip(models, (1, 7), strict=True))
    noise = torch.randn(3, batch.num_tokens, generator=torch.Generator().manual_seed(0))
    batch.old_logprobs, batch.ref_logprobs, batch.sampler_logprobs = whole.score(batch).float() + 0.2 * noise
    expected, found = (gradient(backend, batch, LOSSES[loss]) for backend in (whole, parts))
    assert found.dtype == dtype
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("aggregation", ["token-mean", "trajectory-mean-token-mean", "seq-mean-token-mean"])
def test_weight_of_a_rollout_does_not_depend_on_its_segments(
    make_backend: MakeBackend, make_model: Make, aggregation: Aggregation
) -> None:
    """The same tokens after the same prefixes, once as a conversation and once as two segments."""
    start, turn, result = [5, 6, 7], [11, 12, 13, 14], [21, 22]
    whole = [*start, *turn, *result, 31]
    turns = [StepSpan(step_id="a", start=3, stop=7), StepSpan(step_id="b", start=9, stop=10)]
    conversation = [TokenSequence(ids=whole, spans=turns, logprobs=[-1.0] * 5)]
    segments = [
        TokenSequence(ids=[*start, *turn], spans=turns[:1], logprobs=[-1.0] * 4),
        TokenSequence(ids=whole, spans=turns[1:], logprobs=[-1.0]),
    ]
    backend = make_backend(in_float64(make_model()))

    def gradient_of(rollout: list[TokenSequence]) -> Tensor:
        batch = Batch.of([*rollout, sequence_of([5, 6, 8], [11, 12])])
        batch.trajectory_of = torch.tensor([0] * 5 + [1] * 2)
        batch.advantages = torch.tensor([1.0] * 5 + [-0.5] * 2)
        return gradient(backend, batch.with_weights(aggregation))

    one, two = gradient_of(conversation), gradient_of(segments)
    is_equal = bool((one - two).norm() <= 1e-6 * one.norm())  # the weights are float32
    assert is_equal == (aggregation != "seq-mean-token-mean")


def test_entropy_bonus_flattens_the_policy(make_backend: MakeBackend, groups: Make) -> None:
    batch: Batch = groups(2, 3)
    batch.advantages = torch.zeros(batch.num_tokens)
    backend = make_backend(lr=1e-3)
    entropies = [update_weights(backend, batch, GRPO(entropy_coef=1.0)).metrics["policy/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 1e-3


def test_divergence_pulls_back_to_the_reference(make_backend: MakeBackend, make_model: Make, groups: Make) -> None:
    backend, original = make_backend(lr=1e-3), make_backend(make_model(seed=1))
    batch: Batch = groups(2, 3)
    batch.advantages = torch.zeros(batch.num_tokens)
    batch.ref_logprobs = original.score(batch)
    divergence = [update_weights(backend, batch, GRPO(kl_coef=1.0)).metrics["policy/kl"] for _ in range(4)]
    assert divergence == sorted(divergence, reverse=True)
    assert divergence[-1] < divergence[0] - 1e-3


def test_autocast_changes_results_but_not_stored_formats(
    make_backend: MakeBackend, make_model: Make, groups: Make
) -> None:
    batch, plain, fast = groups(), make_backend(lr=1e-3), make_backend(lr=1e-3, autocast=True)
    exact, rough = plain.score(batch), fast.score(batch)
    assert rough.dtype == torch.float32
    assert 1e-6 < (rough - exact).abs().max() < 0.2
    assert torch.nn.functional.cosine_similarity(gradient(plain, batch), gradient(fast, batch), dim=0) > 0.98
    assert {weight.dtype for weight in fast.model.parameters()} == {torch.float32}
    # Old and new log-probabilities are both rounded, so the ratio is 1 before the first update.
    batch.old_logprobs = rough
    assert update_weights(fast, batch, GRPO()).metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)


def test_adamw_in_main_memory_gives_the_same_weights(make_backend: MakeBackend, groups: Make, tmp_path: Path) -> None:
    plain, spared, resumed = (make_backend(lr=1e-3, offload=offload) for offload in (False, True, True))
    for backend in (plain, spared):
        update_weights(backend, groups(), GRPO())
    plain.save(tmp_path)
    resumed.load(tmp_path)
    for backend in (plain, spared, resumed):
        update_weights(backend, groups(seed=1), GRPO())
    expected = weights_of(plain.model)
    assert same_weights(expected, weights_of(spared.model))
    assert same_weights(expected, weights_of(resumed.model)), "a resumed run may move AdamW to main memory"


def test_dropping_sequences_without_advantage_keeps_the_gradient(
    make_backend: MakeBackend, make_model: Make, groups: Make
) -> None:
    batch: Batch = groups(3, 4)
    batch.advantages[batch.sequence_of % 3 == 1] = 0.0
    kept = [index for index in range(len(batch)) if index % 3 != 1]
    backend = make_backend(make_model())
    whole = gradient(backend, batch)
    assert (gradient(backend, batch.select(kept)) - whole).norm() <= 1e-5 * whole.norm()


def test_update_makes_rewarded_tokens_likelier(make_backend: MakeBackend) -> None:
    backend = make_backend(lr=1e-2)
    prompt = [5, 6, 7]
    batch = Batch.of([sequence_of(prompt, [11, 12]), sequence_of(prompt, [13])])
    batch.advantages = torch.tensor([1.0, 1.0, -1.0])
    before = backend.score(batch)
    result = update_weights(backend, batch, GRPO())
    change = backend.score(batch) - before
    assert (change[:2] > 0).all()
    assert change[2] < 0
    assert result.logprobs is not None
    torch.testing.assert_close(result.logprobs, before, atol=1e-6, rtol=0)


def test_update_reports_its_metrics(make_backend: MakeBackend) -> None:
    backend = make_backend(lr=1e-3)
    batch = Batch.of([sequence_of(range(3, 23), [30, 31], [-2.0, -3.0]), sequence_of(range(3, 23), [32], [-4.0])])
    batch.advantages = torch.tensor([1.0, 1.0, -2.0])
    scored = backend.score(batch)
    metrics = update_weights(backend, batch, GRPO()).metrics
    gap = (scored - torch.tensor([-2.0, -3.0, -4.0])).abs()
    assert metrics["policy/sampler_gap_max"] == pytest.approx(gap.max().item(), abs=1e-5)
    assert metrics["policy/sampler_gap_mean"] == pytest.approx(gap.mean().item(), abs=1e-5)
    distance = scored - torch.tensor([-2.0, -3.0, -4.0])
    assert metrics["policy/sampler_kl"] == pytest.approx((distance.exp() - 1 - distance).mean().item(), rel=1e-4)
    assert metrics["policy/loss"] == pytest.approx(0.0, abs=1e-6), "minus the mean advantage"
    assert (metrics["policy/ratio"], metrics["policy/clip_fraction"]) == (1.0, 0.0)
    assert 0 < metrics["policy/entropy"] <= torch.log(torch.tensor(float(backend.model.config.vocab_size)))
    assert metrics["policy/grad_norm"] > 0
    assert (metrics["optim/lr"], metrics["optim/num_updates"]) == (1e-3, 1.0)
    assert (metrics["tokens/trained"], metrics["tokens/forward"]) == (3.0, 21.0), "no answer's last token is computed"
    assert metrics["tokens/shared"] == pytest.approx(1 - 21 / 41)


def test_minibatches_and_epochs_are_separate_updates(make_backend: MakeBackend, groups: Make) -> None:
    backend, batch = make_backend(lr=1e-2, num_minibatches=3, num_epochs=2), groups(3, 4)
    before = backend.score(batch)
    result = update_weights(backend, batch, GRPO())
    assert result.metrics["optim/num_updates"] == 6
    assert result.metrics["policy/ratio"] != 1.0, "later updates see a policy that has moved"
    assert result.logprobs is not None
    torch.testing.assert_close(result.logprobs, before, atol=1e-6, rtol=0)


def test_m2po_masks_each_minibatch_by_the_policy_just_before_its_update(make_backend: MakeBackend) -> None:
    """The answers are less likely for the sampler than for the policy by 0.5 and 0.1 nats, so the first is masked."""
    batch = Batch.of([sequence_of([7, 8], [20]), sequence_of([7, 9], [21])])
    backend = make_backend(lr=1e-3)
    batch.advantages = torch.ones(2)
    batch.sampler_logprobs = backend.score(batch) - torch.tensor([0.5, 0.1])
    assert update_weights(backend, batch, M2PO()).metrics["policy/clip_fraction"] == 0.5
    halves = make_backend(lr=1e-3, num_minibatches=2)
    assert update_weights(halves, batch, M2PO()).metrics["policy/clip_fraction"] == 0.5


def test_reported_loss_is_the_mean_over_updates(make_backend: MakeBackend) -> None:
    batch = Batch.of([sequence_of([1], [2, 3, 4]), sequence_of([1], [5])])
    batch.advantages = torch.tensor([1.0, 1.0, 1.0, 2.0])
    metrics = update_weights(make_backend(lr=1e-12, num_minibatches=2), batch, GRPO()).metrics
    assert metrics["policy/loss"] == pytest.approx(-(1.0 + 2.0) / 2, rel=1e-4)


def test_more_minibatches_than_sequences_are_accepted(make_backend: MakeBackend, groups: Make) -> None:
    assert update_weights(make_backend(num_minibatches=9), groups(1, 2), GRPO()).metrics["optim/num_updates"] == 2


def test_batch_without_advantage_changes_nothing(make_backend: MakeBackend) -> None:
    backend = make_backend(lr=1.0)
    before = weights_of(backend.model)
    assert update_weights(backend, Batch.of([]), GRPO()).metrics == {}
    assert backend.score(Batch.of([])).tolist() == []
    assert same_weights(before, weights_of(backend.model))


async def sampled(backend: LocalBackend, prompts: list[list[int]], **params: Any) -> Batch:
    outputs = await asyncio.gather(
        *(backend.inference.complete(prompt, max_tokens=12, ignore_eos=True, **params) for prompt in prompts)
    )
    assert {output.weight_version for output in outputs} == {backend.weight_version}
    batch = Batch.of([sequence_of(item.prompt_ids, item.completion_ids, item.logprobs) for item in outputs])
    batch.temperature = params.get("temperature", 1.0)
    return batch


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
async def test_trainer_and_sampler_agree_before_and_after_updates(
    make_backend: MakeBackend, make_model: Make, family: str
) -> None:
    backend = make_backend(make_model(family), lr=1e-2)
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9] * 30]
    old = await sampled(backend, prompts, temperature=0.8)
    for version in (1, 2):
        batch = await sampled(backend, prompts, temperature=0.8)
        torch.testing.assert_close(backend.score(batch), batch.sampler_logprobs, atol=1e-4, rtol=0)
        batch.advantages = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(version))
        update_weights(backend, batch, GRPO())
        assert backend.publish() == backend.weight_version == version
    new = await sampled(backend, prompts, temperature=0.8)
    torch.testing.assert_close(backend.score(new), new.sampler_logprobs, atol=1e-4, rtol=0)
    assert (backend.score(old) - old.sampler_logprobs).abs().max() > 1e-2, "the updates changed the policy"


def test_non_finite_weights_are_not_published(make_backend: MakeBackend, make_model: Make) -> None:
    backend = make_backend(make_model())
    with torch.no_grad():
        backend.model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        backend.publish()
    assert backend.weight_version == 0


def test_resumed_run_continues_bit_for_bit(
    make_backend: MakeBackend, make_model: Make, groups: Make, tmp_path: Path
) -> None:
    settings = {"lr": 1e-3, "warmup_steps": 4, "decay_steps": 9}
    one, other = make_backend(make_model(), **settings), make_backend(make_model(seed=1), **settings)
    for seed in range(2):
        update_weights(one, groups(seed=seed), GRPO())
        one.publish()
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.weight_version == 2
    assert same_weights(weights_of(one.model), weights_of(other.model))
    last = [update_weights(backend, groups(seed=2), GRPO()).metrics for backend in (one, other)]
    assert last[0] == last[1]
    assert same_weights(weights_of(one.model), weights_of(other.model))


def test_resumed_bfloat16_run_continues_bit_for_bit(
    make_backend: MakeBackend, make_model: Make, groups: Make, tmp_path: Path
) -> None:
    one, other = (make_backend(make_model(seed=seed).bfloat16(), lr=1e-5) for seed in range(2))
    update_weights(one, groups(), GRPO())
    one.save(tmp_path)
    other.load(tmp_path)
    for backend in (one, other):
        for seed in range(3):
            update_weights(backend, groups(seed=seed), GRPO())
    assert same_weights(weights_of(one.model), weights_of(other.model))


def test_checkpoint_is_an_ordinary_model_folder(make_backend: MakeBackend, groups: Make, tmp_path: Path) -> None:
    backend = make_backend(lr=1e-3)
    update_weights(backend, groups(), GRPO())
    backend.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_weights(weights_of(backend.model), weights_of(model))
    messages = [{"role": "user", "content": "what is it"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == backend.tokenizer.apply_chat_template(
        messages, tokenize=False
    )


def with_two_ids_exchanged(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))


def cut(name: str, length: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:length])

    return damage


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGE = {
    "no weights": without("model.safetensors"),
    "no config": without("config.json"),
    "no optimizer": without(RECOVERY_FILE),
    **{f"{length} bytes of weights": cut("model.safetensors", length) for length in (0, 100, 50_000)},
    **{f"{length} bytes of optimizer": cut(RECOVERY_FILE, length) for length in (0, 100, 50_000)},
    "half a config": cut("config.json", 100),
    "other ids of tokens": with_two_ids_exchanged,
    "another chat template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
}


def test_damaged_checkpoint_is_rejected(make_backend: MakeBackend, groups: Make, tmp_path: Path) -> None:
    backend = make_backend()
    update_weights(backend, groups(1, 2), GRPO())
    assert_rejects_damage(backend, tmp_path, DAMAGE)


@pytest.mark.parametrize("options", [{"num_layers": 3}, {"family": "Llama"}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_checkpoint_of_another_model_is_rejected(
    make_backend: MakeBackend, make_model: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    make_backend(make_model(**options)).save(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint="):
        make_backend().load(tmp_path)


def test_closing_twice_is_allowed(make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend.close()
    backend.close()


def test_update_reports_entropies_and_ratios(make_backend: MakeBackend, groups: Make) -> None:
    batch: Batch = groups(2, 3)
    once = update_weights(make_backend(), batch, GRPO())
    several = update_weights(make_backend(num_minibatches=2, num_epochs=2, lr=1e-3), batch, GRPO())
    for result in (once, several):
        assert result.entropies is not None
        assert len(result.entropies) == batch.num_tokens
    assert once.metrics["policy/entropy"] == pytest.approx(float(once.entropies.mean()), rel=1e-5)
    assert torch.equal(once.ratios, torch.ones(batch.num_tokens))
    assert several.ratios is not None
    assert not torch.allclose(several.ratios, torch.ones(batch.num_tokens))
