"""Attention of decode steps to long prompts whose keys and values are kept once for all rows that begin with them.

Samples of one prompt would otherwise each read a copy of it from main memory; now all but the first read it from the
CPU's cache. A row attends to its prompt and to what follows separately, and the two results are joined by their
log-sum-exp (Juravsky et al. 2024, Hydragen). A row alone does the same, and rows' queries are not multiplied together,
so a row's result does not depend on which others share its prompt.

Shapes: B rows, n of them with a prompt, K key heads, Q queries of each key head and row, D head size, P tokens of a
prompt, W columns that hold what follows prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rllm.inference.local.packed import RowwiseActivation

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_sigmoid = RowwiseActivation(torch.sigmoid)


class PromptAttention:
    """Attention of B rows to their prompts and to what follows; a `SharedPrefix` of one decode step."""

    def __init__(self, prompts: Sequence[Tensor | None]) -> None:
        """Put the rows in order of their prompts.

        Args:
            prompts: prompt of each row, [layer, key or value, K, P, D]; `None` where a row's slot holds all of it.
        """
        found = {id(prompt): prompt for prompt in prompts if prompt is not None}
        rows = {key: [row for row, prompt in enumerate(prompts) if prompt is found[key]] for key in found}
        order = [row for members in rows.values() for row in members]
        self._prompts = list(found.values())
        self._sizes = [len(members) for members in rows.values()]
        self._order = torch.tensor(order)  # [n]
        self._place = torch.zeros(len(prompts), dtype=torch.long)  # [B] of each row in this order
        self._place[self._order] = torch.arange(len(order))
        self._has_none = torch.tensor([prompt is None for prompt in prompts]).view(-1, 1, 1)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [B, K * Q, 1, D]
        keys: Tensor,  # [B, K, W, D]
        values: Tensor,  # [B, K, W, D]
        mask: Tensor | None,  # [B, 1, 1, W]
        scale: float,
    ) -> Tensor:
        """Return [B, K * Q, 1, D] the attention's output."""
        grouped = query.view(*keys.shape[:2], -1, query.shape[-1])  # [B, K, Q, D]
        own, own_total = _attend(grouped, keys, values, attn_mask=mask, scale=scale)
        parts = [
            _attend(part, *prompt[layer].unsqueeze(1).expand(-1, len(part), -1, -1, -1), scale=scale)
            for part, prompt in zip(grouped.index_select(0, self._order).split(self._sizes), self._prompts, strict=True)
        ]
        of_prompt, total = (torch.cat(pieces).index_select(0, self._place) for pieces in zip(*parts, strict=True))
        fraction = _sigmoid((total - own_total).masked_fill_(self._has_none, -torch.inf))  # [B, K, Q]
        # Not `lerp`, which rounds otherwise at the end of a vector.
        joined: Tensor = own + (of_prompt - own) * fraction.unsqueeze(-1)
        return joined.to(query.dtype).reshape(query.shape)
