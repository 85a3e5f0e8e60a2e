"""Scaled dot-product attention that does not copy keys and values for grouped queries."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rllm_sdpa"


class Above(Protocol):
    """Keys that a row attends to besides those that its model is given, as a pass over a token tree has them."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [B, H, T, D]
        keys: torch.Tensor,  # [B, K, T, D]
        values: torch.Tensor,  # [B, K, T, D]
        mask: torch.Tensor | None,  # [B, 1, T, T]; None: each token attends to those before it
        scale: float,
    ) -> torch.Tensor:
        """[B, H, T, D] the attention to both."""
        ...


def use_grouped_attention(model: Any) -> None:
    """Let a model that uses `sdpa` attention with grouped queries run without repeating its keys and values.

    Nothing else changes: what has no mask, and what no kernel would take, goes `transformers`' own path.
    """
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def grouped_attention(
    module: Any,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, K, L, D], K <= H
    value: torch.Tensor,  # [B, K, L, D]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    above: Above | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' sdpa interface. Decoding (T = 1) lets the queries of a group stand as T = H / K of its own.

    A model hands on what it does not know itself, so that `above` gets here from its caller. On a CPU, attention stays in
    float32 under autocast: its kernel takes twice as long for the gradients of bfloat16.
    """
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            states = (query.float(), key.float(), value.float())
            return grouped_attention(module, *states, attention_mask, dropout, scaling, above, **options)
    batch, heads, length, size = query.shape
    is_biased = options.get("position_bias") is not None  # which only transformers' own way adds to the scores
    if above is not None:
        if is_biased:
            raise ValueError("attention with a bias for positions takes no keys from above")
        scale = size**-0.5 if scaling is None else scaling
        out = above.attend(module.layer_idx, query, key, value, attention_mask, scale)
        return out.transpose(1, 2).contiguous(), None
    groups = key.shape[1]
    if attention_mask is not None and groups != heads and not dropout and not is_biased:
        attend = torch.nn.functional.scaled_dot_product_attention
        if length == 1 and not torch.is_grad_enabled():
            grouped = query.view(batch, groups, heads // groups, size)
            out = attend(grouped, key, value, attn_mask=attention_mask, scale=scaling)
            return out.reshape(batch, 1, heads, -1), None
        if query.device.type == "cpu":  # its kernel reads grouped keys in place; the others would leave their fast path
            out = attend(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
