"""A Llama-like model's decode step in about half the operations that `transformers` takes for it, and its prompts.

With few sequences a step's time goes to starting operations, not to arithmetic; and of a prompt only the keys and values
are wanted, for which most of the last layer is not needed. This forward pass uses the model's own modules (so adapters
inside its linear layers count), and is only used where it gives the model's own logits: see `choose_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from rllm.inference.local.attention import grouped_attention
from rllm.inference.local.kv_cache import SlotCache
from rllm.inference.local.stems import StemAttention

_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on nothing but the position."""
_SHARE = 2**15
"""Numbers that torch gives to each thread at least, where an operation is on one by one; of a multiple, each gets as many as
long as there are threads."""
_VECTOR = 64
"""Numbers that it works on at a time at most."""


def suits(model: Any) -> bool:
    """Whether this is a model to try it with; float32 only, where the order of rounding does not matter."""
    return (
        type(model).__name__ in _FAMILIES
        and model.dtype == torch.float32
        and getattr(model.model.rotary_emb, "rope_type", None) in _FIXED_ROPE
    )


class ShortForward:
    """Callable as (tokens [B], positions [B], mask [B, 1, 1, L], cache, number of positions, stems) -> logits [B, V]."""

    def __init__(self, model: Any, products: torch.dtype | None = None) -> None:
        """`products`: the format of its matrix products, where that is not its own. States are rounded to it where the
        trainer's autocast does, so that what is sampled and what is trained differ as little as they can."""
        self._model = model
        self._products = products or model.dtype
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
        cos, sin = self._rotations(positions, num_positions)
        body = self._model.model
        hidden: torch.Tensor = body.embed_tokens(tokens)
        for index, layer in enumerate(body.layers):
            query, keys, values = self._looked_up(layer, index, hidden, len(tokens), cos, sin, cache)
            attention = layer.self_attn
            # The queries that share a key stand as a sequence of their own, so that the keys need not be repeated.
            grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
            if stems is None:
                attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=attention.scaling)
            else:
                attended = stems.attend(index, grouped, keys, values, mask, attention.scaling)
            hidden = self._after_attention(layer, hidden, attended)
        logits: torch.Tensor = self._model.lm_head(self._read(body.norm, hidden))
        return logits.to(hidden.dtype)

    def prefill(
        self,
        tokens: torch.Tensor,  # [N, T]
        positions: torch.Tensor,  # [N, T]
        mask: torch.Tensor,  # [N, 1, T, L]
        cache: SlotCache,
        num_positions: int,
    ) -> None:
        """Put the keys and values of these tokens into the cache."""
        cos, sin = self._rotations(positions.flatten(), num_positions)
        body = self._model.model
        hidden: torch.Tensor = body.embed_tokens(tokens.flatten())
        last = len(body.layers) - 1
        for index, layer in enumerate(body.layers):
            query, keys, values = self._looked_up(layer, index, hidden, len(tokens), cos, sin, cache)
            if index == last:
                return
            attention = layer.self_attn
            attended, _ = grouped_attention(attention, query, keys, values, mask, scaling=attention.scaling)
            hidden = self._after_attention(layer, hidden, attended)

    def _rotations(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, 1, dim] of the tokens at these positions, all below `num_positions`."""
        if len(self._cos) < num_positions:
            self._make_rotations(2 * num_positions)
        return self._cos[positions], self._sin[positions]

    def _looked_up(
        self,
        layer: Any,
        index: int,
        hidden: torch.Tensor,  # [N * T, width]
        num_sequences: int,
        cos: torch.Tensor,  # [N * T, 1, dim]
        sin: torch.Tensor,
        cache: SlotCache,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, H, T, dim] queries, and the keys and values to attend to, those of these tokens among them."""
        attention = layer.self_attn
        dim = attention.head_dim
        normed = self._read(layer.input_layernorm, hidden)
        query, key, value = (
            project(normed).to(hidden.dtype).view(len(hidden), -1, dim)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
        both = torch.cat([query, key], dim=1)
        both = torch.addcmul(both * cos, both.roll(self._half, dims=-1), sin)
        heads = query.shape[1]
        query, key, value = (
            states.unflatten(0, (num_sequences, -1)).transpose(1, 2)
            for states in (both[:, :heads], both[:, heads:], value)
        )
        return query, *cache.update(key, value, index)

    def _after_attention(self, layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + layer.self_attn.o_proj(attended.reshape(len(hidden), -1).to(self._products))
        mlp, normed = layer.mlp, self._read(layer.post_attention_layernorm, hidden)
        gate = _steadily(mlp.act_fn, mlp.gate_proj(normed))
        outputs: torch.Tensor = hidden + mlp.down_proj(gate * mlp.up_proj(normed))
        return outputs

    def _read(self, norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states as linear layers take them."""
        return _normed(norm, hidden).to(self._products)


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _steadily(function: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """An activation, by which each row comes out the same, bit for bit, whatever other rows there are; `states` may change.

    On a CPU torch works in vectors, but goes number by number through what is left at the end of each thread's share, where
    SiLU rounds otherwise. So no share has such a rest here.
    """
    size, num_threads = states.numel(), torch.get_num_threads()
    if states.device.type != "cpu" or (size % _VECTOR == 0 and (size <= _SHARE or num_threads == 1)):
        return function(states)
    flat = states.view(-1)
    whole = size - size % _VECTOR
    in_shares = whole - whole % _SHARE
    for piece in (*flat[:in_shares].split(_SHARE * num_threads), flat[in_shares:whole]):
        if len(piece):
            piece.copy_(function(piece))
    if whole < size:
        flat[whole:] = function(pad(flat[whole:], (0, whole + _VECTOR - size)))[: size - whole]
    return states
