"""What a decoder is: token sequences in, the logits of their next tokens out.

A sequence's last token is always the next step's input. So taking a sequence in computes all of its tokens but the last,
and a prompt that is cached up to there costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Added:
    """A sequence that a decoder has taken in."""

    index: int
    """Which of the prompts it is."""
    num_cached: int
    """How many of its tokens were not computed again."""


class Decoder(Protocol):
    """The sequences in progress, numbered from 0 without gaps."""

    def fits(self, num_sequences: int, length: int) -> bool:
        """Whether there is memory for this many sequences of up to this many tokens."""
        ...

    def add(self, prompts: Sequence[list[int]]) -> list[Added]:
        """Take sequences in; returns them in the order of their numbers. Those that are missing wait for a prefix that
        another one has just computed: add them again now."""
        ...

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each sequence; returns the logits of what follows, [sequences, vocabulary]."""
        ...

    def remove(self, ended: Mapping[int, Sequence[int]]) -> None:
        """Drop sequences, whose tokens are given by their numbers; the others keep their order, and are numbered anew."""
        ...

    def clear(self) -> None:
        """Drop all sequences and forget all prefixes: the weights have changed."""
        ...


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits of the token after `ids`, [1, vocabulary], from a forward pass with neither cache nor padding."""
    inputs = torch.tensor([ids], device=model.device)
    logits: torch.Tensor = model(input_ids=inputs, use_cache=False, **last_logits_only(model)).logits
    return logits[:, -1]


def last_logits_only(model: Any) -> dict[str, Any]:
    """The argument that spares a forward pass the logits of all positions but the last, for models that have it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
