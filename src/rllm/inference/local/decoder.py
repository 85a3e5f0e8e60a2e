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

from rllm.errors import ConfigError, first_line

_ENDS = ([13, 1], [4, 9])
"""Of two sequences that part there."""


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


_CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")
"""In `transformers` before 5.24; from then on; and in state-space models before."""


def cache_argument(model: Any) -> str:
    """What the model's forward pass calls the argument that takes its cache."""
    known = inspect.signature(type(model).forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in known), _CACHE_ARGUMENTS[0])


def last_logits_only(model: Any) -> dict[str, Any]:
    """The argument that spares a forward pass the logits of all positions but the last, for models that have it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def check_causal(model: Any) -> None:
    """Look whether what stands behind a token leaves its logits alone, as in a language model.

    Raises:
        ConfigError: if not: what such a model samples from, token by token, is not what it says of a whole sequence; or if it does not
            run on tokens alone.
    """
    beginning = range(_chunk_size(model) + 5)
    try:
        size = model.get_input_embeddings().num_embeddings
        both = [[(7 * token + 3) % size for token in [*beginning, *end]] for end in _ENDS]
        with torch.no_grad():
            one, other = (
                model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
                .logits[0, : len(beginning)]
                .float()
                for ids in both
            )
    except Exception as error:  # what this model needs beside tokens, or wants to be installed
        raise ConfigError(
            f"{type(model).__name__} cannot be given tokens and nothing else ({type(error).__name__}: {first_line(error)})"
        ) from error
    # Experts that are given other tokens beside these may round otherwise.
    allowed = 1e-3 if model.dtype.itemsize >= 4 else 0.1
    if (one - other).norm() > allowed * one.norm():
        raise ConfigError(
            f"{type(model).__name__} gives a token other probabilities where others stand behind it, so it can neither be sampled "
            "from nor trained token by token: use a causal model (one of BERT's family is causal with is_decoder=true in its "
            "config.json; of state-space layers, transformers' code for want of mamba-ssm is not always)"
        )


def _chunk_size(model: Any) -> int:
    """Tokens that state-space layers compute at a time, or among which Reformer's hashes choose; 0 where there are none."""
    config = model.config.get_text_config(decoder=True)
    if hashed := getattr(config, "lsh_attn_chunk_length", None):
        return int(2 * hashed)
    found = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
    return next((size for size in found if isinstance(size, int)), 0)
