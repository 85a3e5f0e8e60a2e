"""Tiny random models of the architectures of `transformers`, and a test of each: load, sample, train."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.forward import separate_hidden_states
from rllm.backends.lora import LoraSettings
from rllm.backends.update import update_weights
from rllm.config.schema import OptimConfig
from rllm.inference.engine import ModelOutput
from rllm.inference.local.loading import load_model
from rllm.inference.local.slot_decoder import SlotDecoder

Options: TypeAlias = Mapping[str, Any]
LEFT_OUT = object()
"""Value of a base option that an architecture does not take."""

BASE: Options = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: Options = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
MLA: Options = {  # multi-head latent attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
WINDOW: Options = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA: Options = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
DELTA: Options = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
TIED: Options = {"tie_word_embeddings": True}
UNTIED: Options = {"tie_word_embeddings": False}


DENSE, SLIDING, MOE, HYBRID, STATE = "dense", "sliding window", "experts", "hybrid", "state space"

_BY_KIND: Mapping[str, Mapping[str, Options]] = {
    DENSE: {
        "apertus": {},
        "arcee": {},
        "bloom": {"n_head": 4, "n_layer": 2},
        "cohere": {},
        "ernie4_5": {},
        "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": LEFT_OUT},
        "gemma": {},
        "glm": {},
        "glm4": {},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
        "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4},
        "gpt_neox": {},
        "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
        "granite": {},
        "helium": {},
        "hunyuan_v1_dense": {},
        "llama": UNTIED,
        "llama tied": TIED,
        "mistral": {"sliding_window": None},
        "ministral3": {},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
        "nanochat": {},
        "nemotron": {},
        "olmo": {},
        "olmo2": {},
        "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
        "persimmon": {},
        "phi": {},
        "phi3": {},
        "qwen2": UNTIED,
        "qwen2 tied": TIED,
        "qwen3": UNTIED,
        "qwen3 tied": TIED,
        "seed_oss": {},
        "smollm3": {"no_rope_layers": [1, 0]},
        "stablelm": {},
        "starcoder2": {"sliding_window": None},
        "youtu": MLA,
    },
    SLIDING: {
        "cohere2": WINDOW,
        "exaone4": WINDOW,
        "gemma2": WINDOW,
        "gemma3_text": WINDOW,
        "gemma3n_text": {
            **WINDOW,
            "laurel_rank": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "intermediate_size": [48, 48],
        },
        "gemma4_text": {
            **WINDOW,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "global_head_dim": 8,
        },
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 8},
        "ministral": WINDOW,
        "mistral with a window": {"sliding_window": 8},
        "olmo3": WINDOW,
        "phi3 with a window": {"sliding_window": 8},
        "vaultgemma": WINDOW,
    },
    MOE: {
        "afmoe": {**EXPERTS, **WINDOW, "num_dense_layers": 1},
        "cohere2_moe": {**EXPERTS, **WINDOW},
        "deepseek_v2": {**EXPERTS, **MLA, "first_k_dense_replace": 1},
        "deepseek_v3": {**EXPERTS, **MLA, "first_k_dense_replace": 1},
        "dots1": {**EXPERTS, "first_k_dense_replace": 1},
        "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
        "exaone_moe": {**EXPERTS, **WINDOW, "mlp_layer_types": ["dense", "sparse"]},
        "flex_olmo": EXPERTS,
        "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1},
        "glm4_moe_lite": {**EXPERTS, **MLA, "mlp_layer_types": ["dense", "sparse"]},
        "gpt_oss": {**EXPERTS, **WINDOW},
        "granitemoe": EXPERTS,
        "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
        "jetmoe": {**EXPERTS, "kv_channels": 8},
        "llama4_text": {
            **EXPERTS,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 8,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
        },
        "minimax_m2": EXPERTS,
        "mixtral": {**EXPERTS, "sliding_window": None},
        "olmoe": EXPERTS,
        "phimoe": {**EXPERTS, "sliding_window": None},
        "qwen2_moe": EXPERTS,
        "qwen3_moe": EXPERTS,
        "solar_open": {**EXPERTS, "first_k_dense_replace": 1},
        "glm_moe_dsa": {
            **EXPERTS,
            **MLA,
            "mlp_layer_types": ["dense", "sparse"],
            "index_topk": 4,
            "index_head_dim": 16,
            "index_n_heads": 32,
        },
        "deepseek_v4": {**EXPERTS, "q_lora_rank": 8, "num_key_value_heads": 1},
    },
    HYBRID: {
        "bamba": {**MAMBA, "attn_layer_indices": [1]},
        "falcon_h1": {**MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 32},
        "granitemoehybrid": {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
        "jamba": {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        "nemotron_h": {
            **EXPERTS,
            "layers_block_type": ["mamba", "attention", "moe"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "moe_shared_expert_intermediate_size": 16,
            "chunk_size": 8,
        },
        "olmo_hybrid": DELTA,
        "qwen3_5_text": DELTA,
        "qwen3_5_moe_text": {**EXPERTS, **DELTA},
        "qwen3_next": {**EXPERTS, **DELTA},
        "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
        "zamba": {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        },
        "zamba2": {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "use_mamba_kernels": False,
            "num_mem_blocks": 1,
            "chunk_size": 8,
        },
    },
    STATE: {
        "falcon_mamba": {"state_size": 8},
        "mamba": {"state_size": 8},
        "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        "rwkv": {"attention_hidden_size": 32},
        "xlstm": {"num_heads": 4, "head_dim": 8, "chunk_size": 8},
    },
}
_ONE_BY_ONE = {"bloom", "youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
"""Full attention whose keys and values have two sizes, or no cache of the usual kind."""
_NO_TREE = {"bloom", "falcon", "gptj", "mpt", "nemotron", "stablelm"}
"""Full attention that takes its positions from elsewhere than `position_ids`, or with code of its own for SDPA."""
_OTHER_EXPERTS = {
    *("afmoe", "cohere2_moe", "exaone_moe", "gpt_oss", "llama4_text"),  # with windows, chunks or sinks
    *("deepseek_v4", "glm_moe_dsa"),  # attention to a selected few
}
_REFUSED = {"nemotron_h", "zamba2"}
"""State spaces that `transformers` computes wrongly without the package mamba-ssm."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A `model_type` of `transformers`, and its properties here; the tests prove them."""

    name: str
    """The `model_type`, with a variant after a space."""
    kind: str
    options: Options
    """Settings of a tiny model, in addition to those of `BASE`."""

    @property
    def model_type(self) -> str:
        return self.name.split()[0]

    @property
    def has_plain_attention(self) -> bool:
        return self.kind in (DENSE, MOE) and self.name not in _OTHER_EXPERTS

    @property
    def is_batched(self) -> bool:
        """Answers are sampled together, and share the keys and values of common prefixes."""
        return self.has_plain_attention and self.name not in _ONE_BY_ONE

    @property
    def is_tree(self) -> bool:
        """Sequences are trained as a tree, in which common prefixes are computed once."""
        return self.has_plain_attention and self.name not in _NO_TREE

    @property
    def is_refused(self) -> bool:
        return self.name in _REFUSED


ARCHITECTURES = {
    name: Architecture(name=name, kind=kind, options=options)
    for kind, options_of in _BY_KIND.items()
    for name, options in options_of.items()
}


def save_tiny(name: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tiny random model of an architecture, with a tokenizer, as a Hugging Face folder."""
    torch.manual_seed(0)
    options = {**BASE, **ARCHITECTURES[name].options}
    taken = {key: value for key, value in options.items() if value is not LEFT_OUT}
    config = AutoConfig.for_model(ARCHITECTURES[name].model_type, **taken)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms start at a constant, which hides a wrong norm
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.rand_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of sampling from a model and updating it once."""

    is_batched: bool
    """See `Architecture`."""
    is_tree: bool
    sampler_gap: float
    """Largest difference between the sampler's log-probabilities and those of `transformers`, before the update and
    after."""
    trainer_gap: float
    """The same for the trainer's log-probabilities."""
    moved: float
    """Largest change of a log-probability by the update."""


def plain_logprobs(model: Any, sequence: TokenSequence) -> Tensor:
    """Return [n] log-probabilities of an answer by the model's own forward pass without cache."""
    [span] = sequence.spans
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sequence.ids]), use_cache=False).logits[0].float()
    ids = torch.tensor(sequence.ids[span.start : span.stop])
    return logits[span.start - 1 : span.stop - 1].log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)


PROMPTS = [[5, 9, 17, 40, 41, 8, 11, 23, 31, 12, 60, 7, 19], [5, 9, 17, 40, 6], [77]]


async def sampled(backend: LocalBackend) -> list[TokenSequence]:
    """Return two answers to each prompt, sampled at once."""
    asked = [prompt for prompt in PROMPTS for _ in range(2)]
    calls = (backend.inference.complete(ids, max_tokens=12, ignore_eos=True, seed=n) for n, ids in enumerate(asked))
    return [_sequence(output) for output in await asyncio.gather(*calls)]


def _sequence(output: ModelOutput) -> TokenSequence:
    ids = [*output.prompt_ids, *output.completion_ids]
    span = StepSpan(step_id="step", start=len(output.prompt_ids), stop=len(ids))
    return TokenSequence(ids=ids, spans=[span], logprobs=list(output.logprobs))


def tried(folder: Path, *, lora: bool) -> Trial:
    """Sample from a model, update it once, and sample again.

    Raises:
        ConfigError: if the model is refused.
    """
    loaded = load_model(folder, device="cpu")
    settings = LoraSettings(rank=4, alpha=8.0) if lora else None
    optim = OptimConfig(lr=3e-3, warmup_steps=0)
    backend = LocalBackend(loaded, optim, lora=settings, max_concurrent=8)
    try:
        gaps, trainer_gaps = [], []
        for _ in range(2):
            sequences = asyncio.run(sampled(backend))
            batch = Batch.of(sequences)
            batch.advantages = torch.tensor([1.0, -1.0] * len(PROMPTS))[batch.sequence_of]
            plain = torch.cat([plain_logprobs(backend.model, sequence) for sequence in sequences])
            given = torch.tensor([value for sequence in sequences for value in sequence.logprobs])
            gaps.append(float((given - plain).abs().max()))
            trainer_gaps.append(float((backend.score(batch) - plain).abs().max()))
            if len(gaps) == 1:
                update_weights(backend, batch.with_weights("token-mean"), GRPO())
                backend.publish()
                moved = float((backend.score(batch) - plain).abs().max())
        return Trial(
            is_batched=isinstance(backend.inference._scheduler._decoder, SlotDecoder),
            is_tree=backend.policy.trunk.hidden_states is not separate_hidden_states,
            sampler_gap=max(gaps),
            trainer_gap=max(trainer_gaps),
            moved=moved,
        )
    finally:
        backend.close()
