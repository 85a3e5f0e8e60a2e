"""Weights with an adapter, over tiny random models of many architectures: counted, sampled with, saved and merged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rllm.backends.lora import Adapter, LoraSettings, by_kind, coverage
from rllm.errors import ConfigError
from rllm.inference.local.loading import load_model

from ..models.architectures import BASE
from .conftest import strengthen
from .test_lora import plain_logprobs

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]

EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
MIXED = ["linear_attention", "full_attention"]
LINEAR = {f"linear_{name}": size for name, size in [("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 8)]}
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
GRANITE = ["block_sparse_moe.input_linear", "block_sparse_moe.output_linear"]

FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    # the configuration, and the kinds of weights that could have an adapter, except for linear layers
    "llama": ({}, []),
    "qwen3": ({"tie_word_embeddings": True}, []),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, []),
    "qwen3_moe": (EXPERTS, []),
    "qwen3_moe with a dense layer": ({**EXPERTS, "mlp_only_layers": [0]}, []),
    "mixtral": (EXPERTS, []),
    "qwen2_moe": ({**EXPERTS, "shared_expert_intermediate_size": 16}, STACKED),
    "glm4_moe": ({**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}, []),
    "granitemoe": (EXPERTS, GRANITE),
    "gpt_oss": ({**EXPERTS, "layer_types": ["full_attention"] * 2}, STACKED),
    "falcon_h1": ({"mamba_d_ssm": 32, **MAMBA, "mamba_n_heads": 4}, []),
    "granitemoehybrid": (
        {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
        GRANITE,
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, []),
    "lfm2_moe": ({**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, STACKED),
    "qwen3_next": (
        {**EXPERTS, **LINEAR, "linear_value_head_dim": 8, "layer_types": MIXED, "shared_expert_intermediate_size": 16},
        [],
    ),
}
MakeBackend = Callable[..., Any]


def made(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **{**BASE, **FAMILIES[family][0]})
    return AutoModelForCausalLM.from_config(config).eval()


def merged(model: Any, adapter: Adapter) -> dict[str, Any]:
    """Return the model's weights by their own names, after a change of all that have an adapter."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.3)
    return dict(adapter._inside.merge_and_unload().named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_coverage_equals_the_weights_that_a_merge_changes(family: str) -> None:
    plain, model = made(family), made(family)
    adapter = Adapter(model, LoraSettings(rank=2, alpha=4))
    found, before = adapter.coverage, dict(plain.named_parameters())
    after = merged(model, adapter)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert set(found.adapted) == changed
    assert found.fraction == sum(before[name].numel() for name in changed) / sum(map(torch.numel, before.values()))
    assert not found.adapted.keys() & found.without.keys()
    assert found.adapted.keys() | found.without.keys() == {name for name in before if before[name].dim() >= 2}
    left = dict.fromkeys(found.adaptable, 1)
    assert sorted(by_kind(left)) == sorted(FAMILIES[family][1])


def test_experts_without_adapter_are_warned_about_once(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rllm"):
        make_backend(made("granitemoe"), lora=LoraSettings(rank=2, alpha=4))
    (found,) = [record.getMessage() for record in caplog.records if "LoRA adapts" in record.getMessage()]
    assert found.startswith("LoRA adapts 10 % of the weights: self_attn.q_proj, ")
    assert "without an adapter: block_sparse_moe.input_linear (39 %), " in found
    assert f"model.lora_targets=[all-linear,{','.join(GRANITE)}] adapts " in found


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("granitemoe", ["all-linear", *GRANITE]),
        pytest.param("qwen3_moe with a dense layer", ["all-linear"], marks=pytest.mark.slow),
        pytest.param("gpt_oss", ["all-linear", *STACKED], marks=pytest.mark.slow),
        pytest.param("qwen2_moe", ["q_proj", "mlp.gate", *STACKED], marks=pytest.mark.slow),
        pytest.param("lfm2_moe", ["all-linear", *STACKED], marks=pytest.mark.slow),
        pytest.param("glm4_moe", ["all-linear"], marks=pytest.mark.slow),
        pytest.param("falcon_h1", ["all-linear"], marks=pytest.mark.slow),
    ],
)
async def test_adapted_layers_are_sampled_saved_and_merged(
    make_backend: MakeBackend, tokenizer: Any, tmp_path: Path, family: str, targets: list[str]
) -> None:
    made(family).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    backend = make_backend(model, lora=LoraSettings(rank=2, alpha=4, targets=targets))
    assert not backend.adapter.coverage.adaptable or family == "qwen2_moe"
    strengthen(backend)
    outputs = await asyncio.gather(
        *(backend.inference.complete(ids, max_tokens=8, ignore_eos=True) for ids in ([5, 6, 7], [9] * 20))
    )
    backend.save(tmp_path / "saved")
    whole = load_model(tmp_path / "saved", device="cpu").model
    again = make_backend(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(),
        lora=LoraSettings(rank=2, alpha=4, targets=targets),
        seed=1,
    )
    again.load(tmp_path / "saved")
    with torch.no_grad():
        for output in outputs:
            sequence, start = [*output.prompt_ids, *output.completion_ids], len(output.prompt_ids)
            for one in (backend.model, whole, again.model):
                expected = plain_logprobs(one, sequence, start)
                torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "granitemoe", "qwen3_next"])
def test_coverage_is_computed_without_weights(tokenizer: Any, tmp_path: Path, family: str) -> None:
    settings, model = LoraSettings(rank=2, alpha=4), made(family)
    model.config.save_pretrained(tmp_path)
    assert coverage(tmp_path, settings) == Adapter(model, settings).coverage


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", ["q_proj", "nowhere"]), ("granitemoe", ["all-linear", "experts.w1"]), ("qwen3_moe", ["q_proj", "w9"])],
)
def test_unknown_target_among_known_ones_is_rejected(family: str, targets: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"model.lora_targets=.* has no '{targets[1]}'"):
        Adapter(made(family), LoraSettings(rank=2, alpha=4, targets=targets))


@pytest.mark.parametrize("tied", [False, True])
def test_head_in_addition_to_all_linear_is_rejected(tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE, tie_word_embeddings=tied))
    with pytest.raises(ConfigError, match="lm_head"):
        Adapter(model, LoraSettings(rank=2, alpha=4, targets=["all-linear", "lm_head"]))


def test_partially_matched_target_is_reported() -> None:
    found = Adapter(made("qwen2_moe"), LoraSettings(rank=2, alpha=4, targets=["0.self_attn.q_proj"])).coverage
    assert set(found.adapted) == {"model.layers.0.self_attn.q_proj.weight"}
    assert "self_attn.q_proj (" in str(found)
