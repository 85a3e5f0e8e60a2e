from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import RECOVERY_FILE, LocalBackend
from rllm.backends.local.forward import hidden_states_by_shared_prefixes
from rllm.backends.lora import Adapter, LoraSettings
from rllm.backends.update import update_weights
from rllm.errors import ConfigError, MissingDependencyError
from rllm.inference.local.decoders import DynamicDecoder, RecomputeDecoder
from rllm.inference.local.loading import ADAPTER_WEIGHTS_FILE, load_model
from rllm.inference.local.slot_decoder import SlotDecoder

from .conftest import assert_rejects_damage, in_float64, same_weights, sequence_of, strengthen, weights_of

Make = Callable[..., Any]
MakeBackend = Callable[..., LocalBackend]
SMALL = LoraSettings(rank=2, alpha=4)
LAGUNA = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
}


def frozen(backend: LocalBackend) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights_of(backend.model).items() if ".lora_" not in name}


def plain_logprobs(model: Any, sequence: list[int], start: int) -> Tensor:
    logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
    every = torch.log_softmax(logits, dim=-1)
    return torch.stack([every[place - 1, sequence[place]] for place in range(start, len(sequence))])


def test_new_adapter_changes_nothing(make_backend: MakeBackend, make_model: Make, groups: Make) -> None:
    batch = groups()
    adapted = make_backend(make_model(num_layers=1), lora=SMALL).score(batch)
    torch.testing.assert_close(adapted, make_backend(make_model(num_layers=1)).score(batch), atol=1e-6, rtol=1e-6)


def test_only_the_adapter_is_trained(make_backend: MakeBackend, make_model: Make, groups: Make) -> None:
    backend = make_backend(make_model(), lora=SMALL, lr=1e-2)
    before, scored = frozen(backend), backend.score(groups())
    update_weights(backend, groups(), GRPO())
    assert same_weights(before, frozen(backend))
    assert (backend.score(groups()) - scored).abs().max() > 1e-3
    names = [name for name, weight in backend.model.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * 7 * 2, "two layers, seven linear modules, two matrices"
    assert all(".lora_" in name for name in names)


def test_adapter_output_matches_a_hand_computed_value(make_model: Make) -> None:
    model = make_model()  # 32 wide
    Adapter(model, LoraSettings(rank=2, alpha=4, targets=["up_proj"]))
    up = model.model.layers[0].mlp.up_proj
    for weight in up.parameters():
        torch.nn.init.ones_(weight)
    # W x + alpha / rank * B A x, with W x = 32, A x = (32, 32) and B A x = 64
    assert up(torch.ones(32))[0].item() == 32 + 4 / 2 * 64


async def answers(backend: LocalBackend) -> list[Any]:
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9] * 30, [3]]
    return await asyncio.gather(
        *(backend.inference.complete(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts)
    )


@pytest.mark.parametrize(
    ("family", "options", "decoder"),
    [
        ("Qwen3", {}, SlotDecoder),
        pytest.param("Llama", {"attention_bias": True}, SlotDecoder, marks=pytest.mark.slow),
        ("Mistral", {"sliding_window": 8}, DynamicDecoder),
    ],
    ids=str,
)
async def test_sampler_decodes_with_the_adapter(
    make_backend: MakeBackend, make_model: Make, family: str, options: dict[str, Any], decoder: type
) -> None:
    backend = make_backend(make_model(family, **options), lora=SMALL)
    plain = make_model(family, **options)
    strengthen(backend)
    used = backend.inference._scheduler._decoder
    assert type(used) is decoder
    with torch.no_grad():
        for output in await answers(backend):
            sequence, start = [*output.prompt_ids, *output.completion_ids], len(output.prompt_ids)
            found = torch.tensor(output.logprobs)
            expected = plain_logprobs(backend.model, sequence, start)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            assert (found - plain_logprobs(plain, sequence, start)).abs().max() > 1e-2, (
                "the adapter changes the log-probabilities"
            )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
async def test_sampler_applies_the_adapter_of_a_router(make_backend: MakeBackend, tokenizer: Any) -> None:
    """For AFMoE's router, a linear layer, peft computes a new weight in each pass, which a packed copy would miss."""
    config = AutoConfig.for_model("afmoe", vocab_size=len(tokenizer), num_dense_layers=0, **LAGUNA)
    backend = make_backend(AutoModelForCausalLM.from_config(config).eval(), lora=SMALL)
    strengthen(backend)
    with torch.no_grad():
        for output in await answers(backend):
            sequence, start = [*output.prompt_ids, *output.completion_ids], len(output.prompt_ids)
            expected = plain_logprobs(backend.model, sequence, start)
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


async def test_trainer_and_sampler_agree_after_updates(make_backend: MakeBackend, make_model: Make) -> None:
    backend = make_backend(make_model(), lora=SMALL, lr=3e-2)
    for seed in range(3):
        outputs = await answers(backend)
        batch = Batch.of([sequence_of(item.prompt_ids, item.completion_ids, item.logprobs) for item in outputs])
        torch.testing.assert_close(backend.score(batch), batch.sampler_logprobs, atol=1e-4, rtol=0)
        batch.advantages = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
        update_weights(backend, batch, GRPO())
        backend.publish()


def test_decoder_that_ignores_the_adapter_is_not_chosen(
    make_backend: MakeBackend, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: SlotDecoder, *args: Any, **options: Any) -> Any:
            layer = self._model.model.layers[0].self_attn.q_proj
            layer.enable_adapters(False)
            try:
                return original(self, *args, **options)
            finally:
                layer.enable_adapters(True)

        return run

    monkeypatch.setattr(SlotDecoder, "_forward", without_adapter(SlotDecoder._forward))
    backend = make_backend(make_model(num_layers=1), lora=SMALL)
    assert isinstance(backend.inference._scheduler._decoder, DynamicDecoder | RecomputeDecoder)


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_number_of_micro_batches(
    make_backend: MakeBackend, make_model: Make, groups: Make
) -> None:
    batch: Batch = groups(2, 7)
    limits = {len(list(batch.split(limit))): limit for limit in range(200)}
    found = {}
    for pieces in (1, 2, 7):
        backend = make_backend(in_float64(make_model()), lora=SMALL, micro_batch_tokens=limits[pieces])
        strengthen(backend)
        backend.accumulate(batch, GRPO(entropy_coef=0.1))
        weights = backend.model.parameters()
        found[pieces] = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
    for pieces in (2, 7):
        assert (found[pieces] - found[1]).norm() <= 1e-10 * found[1].norm()


def test_shared_prefixes_and_recomputation_work_with_an_adapter(
    make_backend: MakeBackend, make_model: Make, groups: Make
) -> None:
    found = []
    for recompute in (False, True):
        backend = make_backend(make_model(), lora=SMALL, gradient_checkpointing=recompute)
        assert backend.policy.trunk.hidden_states is hidden_states_by_shared_prefixes
        strengthen(backend)
        backend.accumulate(groups(), GRPO())
        found.append(torch.cat([w.grad.flatten() for w in backend.model.parameters() if w.grad is not None]))
    assert torch.equal(*found)


def test_peft_can_load_the_checkpoint(
    make_backend: MakeBackend, make_model: Make, groups: Make, tmp_path: Path
) -> None:
    backend = make_backend(make_model(), lora=SMALL, lr=1e-2)
    update_weights(backend, groups(), GRPO())
    backend.publish()
    backend.save(tmp_path)
    assert not (tmp_path / "model.safetensors").exists(), "the frozen weights are not written again"
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4)
    theirs = PeftModel.from_pretrained(make_model(), tmp_path).eval()
    sequence = list(range(3, 20))
    with torch.no_grad():
        expected = plain_logprobs(backend.model, sequence, 1)
        torch.testing.assert_close(plain_logprobs(theirs, sequence, 1), expected, atol=1e-6, rtol=1e-6)


def test_transformers_loads_the_checkpoint_with_its_model(
    make_backend: MakeBackend, make_model: Make, tokenizer: Any, groups: Make, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path / "base")
    backend = make_backend(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora=SMALL, lr=1e-2)
    update_weights(backend, groups(), GRPO())
    backend.publish()
    backend.save(tmp_path / "adapted")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "adapted").eval()
    sequence = list(range(3, 20))
    with torch.no_grad():
        expected = plain_logprobs(backend.model, sequence, 1)
        torch.testing.assert_close(plain_logprobs(theirs, sequence, 1), expected, atol=1e-6, rtol=1e-6)


def test_checkpoint_finds_its_model_from_any_folder(
    make_backend: MakeBackend, make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    make_backend(AutoModelForCausalLM.from_pretrained("base"), lora=SMALL).save(tmp_path / "adapted")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "adapted").name_or_path == str(tmp_path / "base")


def test_resumed_run_continues_bit_for_bit(
    make_backend: MakeBackend, make_model: Make, groups: Make, tmp_path: Path
) -> None:
    one, other = (make_backend(make_model().to(torch.bfloat16), lora=SMALL, lr=1e-3, seed=seed) for seed in range(2))
    for seed in range(2):
        update_weights(one, groups(seed=seed), GRPO())
        one.publish()
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.weight_version == 2
    last = [update_weights(backend, groups(seed=2), GRPO()).metrics for backend in (one, other)]
    assert last[0] == last[1]
    assert same_weights(weights_of(one.model), weights_of(other.model))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_adapter_is_loaded_by_its_saved_names(make_backend: MakeBackend, tokenizer: Any, tmp_path: Path) -> None:
    """peft renames Laguna's `shared_experts` when it loads them, and then does not find them."""
    config = AutoConfig.for_model(
        "laguna", vocab_size=len(tokenizer), mlp_layer_types=["sparse"], num_attention_heads_per_layer=[4], **LAGUNA
    )
    original = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    original.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    one, other = (
        make_backend(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), lora=SMALL, seed=seed)
        for seed in range(2)
    )
    strengthen(one)
    one.save(tmp_path)
    other.load(tmp_path)
    assert same_weights(weights_of(one.model), weights_of(other.model))
    ids = torch.tensor([[5, 6, 7]])
    merged = load_model(tmp_path, device="cpu").model
    torch.testing.assert_close(merged(ids).logits, one.model(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_router_with_bias_accepts_an_adapter(make_backend: MakeBackend, make_model: Make, groups: Make) -> None:
    config = AutoConfig.for_model("glm4_moe", vocab_size=300, n_routed_experts=2, first_k_dense_replace=0, **LAGUNA)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    backend = make_backend(model, lora=SMALL)
    strengthen(backend)
    batch = groups()
    expected = [plain_logprobs(model, item.ids, item.spans[0].start) for item in batch.sequences]
    torch.testing.assert_close(backend.score(batch), torch.cat(expected).detach(), atol=1e-5, rtol=0)


def test_model_without_cache_support_accepts_an_adapter() -> None:
    """The states of xLSTM do not fit the cache that `transformers` creates for it."""
    sizes = {"hidden_size": 32, "num_heads": 4, "num_blocks": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlstm", vocab_size=300, **sizes)).eval()
    assert Adapter(model, SMALL).settings == SMALL


def test_routers_that_only_look_linear_get_no_adapter(make_backend: MakeBackend, tokenizer: Any) -> None:
    """Phi-MoE's router is a linear layer whose output is a pair."""
    sizes = {**LAGUNA, "num_local_experts": 2, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("phimoe", vocab_size=len(tokenizer), **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    adapted = make_backend(model, lora=SMALL).adapter.coverage.adapted
    assert any("self_attn.q_proj" in name for name in adapted)
    assert not any("router" in name for name in adapted)


def test_same_seed_gives_the_same_initial_adapter(make_backend: MakeBackend, make_model: Make) -> None:
    one, same, other = (
        weights_of(make_backend(make_model(num_layers=1), lora=SMALL, seed=seed).model) for seed in (1, 1, 2)
    )
    assert same_weights(one, same)
    assert not same_weights(one, other)
    model, state = make_model(), torch.get_rng_state()
    make_backend(model, lora=SMALL)
    assert torch.equal(state, torch.get_rng_state()), "the global random state is unchanged"


def cut(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS_FILE).write_bytes((folder / ADAPTER_WEIGHTS_FILE).read_bytes()[:200])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no adapter": lambda folder: (folder / ADAPTER_WEIGHTS_FILE).unlink(),
    "half an adapter": cut,
    "no settings": lambda folder: (folder / "adapter_config.json").unlink(),
    "no optimizer": lambda folder: (folder / RECOVERY_FILE).unlink(),
}


def test_damaged_checkpoint_is_rejected(make_backend: MakeBackend, make_model: Make, tmp_path: Path) -> None:
    backend = make_backend(make_model(num_layers=1), lora=SMALL)
    assert_rejects_damage(backend, tmp_path, DAMAGE)


def test_checkpoint_of_another_adapter_is_rejected(make_backend: MakeBackend, make_model: Make, tmp_path: Path) -> None:
    make_backend(make_model(num_layers=1), lora=SMALL).save(tmp_path)
    for lora, message in (
        (LoraSettings(rank=3, alpha=4), "keep model.lora_rank and model.lora_targets"),
        (LoraSettings(rank=2, alpha=8), "its adapter has lora_alpha=4"),
        (None, "incomplete or of another model"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_backend(make_model(num_layers=1), lora=lora).load(tmp_path)


def test_unknown_layers_are_rejected(make_backend: MakeBackend, make_model: Make) -> None:
    with pytest.raises(ConfigError, match=r"model.lora_targets=\['nowhere'\]"):
        make_backend(make_model(num_layers=1), lora=LoraSettings(rank=2, alpha=4, targets=["nowhere"]))


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_embeddings_are_rejected_as_targets(make_backend: MakeBackend, make_model: Make) -> None:
    with pytest.raises(ConfigError, match=r"model.lora_targets=\['embed_tokens'\]"):
        make_backend(make_model(num_layers=1), lora=LoraSettings(rank=2, alpha=4, targets=["embed_tokens"]))


def test_missing_peft_error_names_the_extra(
    make_backend: MakeBackend, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match="peft"):
        make_backend(make_model(num_layers=1), lora=SMALL)
