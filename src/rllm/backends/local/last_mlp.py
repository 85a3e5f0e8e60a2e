"""The model's last block of linear layers, run only for the tokens whose output is read.

Keys and values are needed of every token, but after the last attention a token is on its own: what is computed of one without
a loss, as of a prompt, is never used. In a small model that is a tenth of the work, in a large one next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_WORTH_IT = 7 / 8
"""Where more tokens than this share are read, picking them out costs more than it saves."""


def last_mlp(model: nn.Module) -> nn.Module | None:
    """The feed-forward block of the model's last layer, where it is one that works on each token by itself."""
    layers = getattr(model, "layers", None)
    mlp = getattr(layers[-1], "mlp", None) if isinstance(layers, nn.ModuleList) and len(layers) else None
    plain = isinstance(mlp, nn.Module) and all(
        isinstance(part, nn.Linear) or not list(part.parameters(recurse=False)) for part in mlp.modules()
    )
    return mlp if plain else None


@contextmanager
def only_for(tokens: Tensor, shape: Sequence[int], mlp: nn.Module | None) -> Iterator[None]:
    """Inside, `mlp` gives zeros for all tokens of a pass, `shape` = (b, L), but these, which are numbered from 0 to b * L.

    Where there is no such block, or few tokens to leave out, all of them are run.
    """
    num_tokens = math.prod(shape)
    if mlp is None or len(tokens) > _WORTH_IT * num_tokens:
        yield
        return

    def narrow(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        return (hidden.flatten(0, 1).index_select(0, tokens).unsqueeze(0), *others)

    def widen(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        zeros = output.new_zeros(num_tokens, output.shape[-1])
        return zeros.index_copy(0, tokens, output[0]).unflatten(0, shape)

    handles = [mlp.register_forward_pre_hook(narrow), mlp.register_forward_hook(widen)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
