"""A model's body over a batch: the hidden state from which each sampled token is predicted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.backends.local.forward import HiddenStates, choose_forward
from rllm.backends.local.recompute import check_recomputing, recomputable_layers, recomputing
from rllm.backends.local.rms_norm import use_quick_norms
from rllm.inference.local.attention import use_grouped_attention


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """A model without its head, and how it is run."""

    module: Any
    hidden_states: HiddenStates
    autocast: bool = False
    """Whether its matrix products are done in bfloat16, whatever the format of the weights."""
    recompute: bool = False
    """Whether its layers are run again in the backward pass instead of being kept."""

    @classmethod
    def of(cls, module: Any, *, autocast: bool = False, recompute: bool = False) -> Trunk:
        """With the fastest forward pass that suits the module.

        Raises:
            ConfigError: if it is to be recomputed and cannot be.
        """
        if recompute:
            check_recomputing(module)
        use_grouped_attention(module)
        use_quick_norms(module)
        return cls(module=module, hidden_states=choose_forward(module), autocast=autocast, recompute=recompute)

    def like(self, module: Any) -> Trunk:
        """A module of the same kind, run in the same way."""
        use_quick_norms(module)
        return replace(self, module=module)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.module.parameters()).device
        return device

    def arithmetic(self) -> AbstractContextManager[Any]:
        """The number format of what is computed inside."""
        context: AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.autocast
        )
        return context

    def before_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[U, hidden size] the hidden states that sampled tokens are predicted from, each once; and [N] which of them is each
        token's: that of the token before it."""
        sources, state_of = torch.tensor(_predecessors(batch), dtype=torch.long).unique(return_inverse=True)
        if self.recompute and torch.is_grad_enabled():
            with recomputing(recomputable_layers(self.module)):
                states = self.hidden_states(self.module, batch.tree)
        else:
            read = torch.zeros(len(batch.tree.ids), dtype=torch.bool).index_fill(0, sources, True)
            states = self.hidden_states(self.module, batch.tree, read=read)
        return states.index_select(0, sources.to(self.device)), state_of.to(self.device)


def in_parts(batch: Batch, max_tokens: int, measure: Callable[[Batch], Tensor]) -> Tensor:
    """[N] what `measure` says of the tokens, asked for parts of at most `max_tokens`; without gradient, in main memory."""
    pieces = [torch.zeros(0)]
    with torch.no_grad():
        pieces += [measure(batch.select(run)).cpu() for run in batch.split(max_tokens)]
    return torch.cat(pieces)


def _predecessors(batch: Batch) -> list[int]:
    """For each of the N sampled tokens, where in the tree the token before it lies."""
    sources: list[int] = []
    for index, sequence in enumerate(batch.sequences):
        positions = batch.tree.positions(index)
        sources.extend(positions[place - 1] for place in sequence.sampled_positions())
    return sources
