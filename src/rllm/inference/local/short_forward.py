"""One decode step of a Llama-like model in about half the operations that `transformers` takes for it.

With few sequences a step's time goes to starting operations, not to arithmetic. This forward pass uses the model's own
modules (so adapters inside its linear layers count), and is only used where it gives the model's own logits: see `choose_decoder`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from rllm.inference.local.kv_cache import SlotCache
from rllm.inference.local.stems import StemAttention

_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on nothing but the position."""


def suits(model: Any) -> bool:
    """Whether this is a model to try it with; float32 only, where the order of rounding does not matter."""
    return (
        type(model).__name__ in _FAMILIES
        and model.dtype == torch.float32
        and getattr(model.model.rotary_emb, "rope_type", None) in _FIXED_ROPE
    )


class ShortForward:
    """Callable as (tokens [B], positions [B], mask [B, 1, 1, L], cache, number of positions, stems) -> logits [B, V]."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._make_rotations(0)

    def _make_rotations(self, length: int) -> None:
        """Tables [position, 1, dim]. A rotation is x * cos + roll(x, dim / 2) * sin, the first half of sin negated."""
        positions = torch.arange(length, device=self._model.device).unsqueeze(0)
        cos, sin = self._model.model.rotary_emb(self._model.lm_head.weight[:1], positions)
        self._half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1).clone()
        self._sin[..., : self._half] *= -1

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotCache,
        num_positions: int,
        stems: StemAttention | None,
    ) -> torch.Tensor:
        if len(self._cos) < num_positions:
            self._make_rotations(2 * num_positions)
        body = self._model.model
        cos, sin = self._cos[positions], self._sin[positions]
        hidden: torch.Tensor = body.embed_tokens(tokens)
        for index, layer in enumerate(body.layers):
            normed = _normed(layer.input_layernorm, hidden)
            hidden = hidden + self._attended(layer.self_attn, index, normed, cos, sin, mask, cache, stems)
            hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
        logits: torch.Tensor = self._model.lm_head(_normed(body.norm, hidden))
        return logits

    def _attended(
        self,
        attention: Any,
        index: int,
        hidden: torch.Tensor,  # [B, width]
        cos: torch.Tensor,  # [B, 1, dim]
        sin: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotCache,
        stems: StemAttention | None,
    ) -> torch.Tensor:
        batch, dim = len(hidden), attention.head_dim
        query = attention.q_proj(hidden).view(batch, -1, dim)
        key = attention.k_proj(hidden).view(batch, -1, dim)
        if hasattr(attention, "q_norm"):
            query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
        heads, groups = query.shape[1], key.shape[1]
        both = torch.cat([query, key], dim=1)
        both = torch.addcmul(both * cos, both.roll(self._half, dims=-1), sin)
        keys, values = cache.update(both[:, heads:], attention.v_proj(hidden).view(batch, groups, dim), index)
        # The queries that share a key stand as a sequence of their own, so that the keys need not be repeated.
        grouped = both[:, :heads].unflatten(1, (groups, heads // groups))
        if stems is None:
            attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=attention.scaling)
        else:
            attended = stems.attend(index, grouped, keys, values, mask, attention.scaling)
        out: torch.Tensor = attention.o_proj(attended.reshape(batch, -1))
        return out


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
