"""The training forward pass: the last hidden state of every token of a token tree.

The tree is cut into rows (`rows.py`), and each pass of the model runs many of them. A row's tokens attend to the keys and
values of the tokens above it, which earlier passes have produced: copied in front of its own, or read as a stem. So every
token is computed once, any Hugging Face model with ordinary attention can be used as it is, and gradients flow through the
shared prefixes to all that share them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rllm.algorithms.tree import ROW_TOKENS, TokenTree, build_tree
from rllm.backends.local.last_mlp import last_mlp, only_for
from rllm.backends.local.rows import LEAD_TOKENS, STEM_SAVED, passes
from rllm.backends.local.tree_keys import TreeKeys
from rllm.backends.local.whole_tree import whole_tree_states
from rllm.inference.local.decoder import cache_argument
from rllm.inference.local.decoders import has_full_attention

logger = logging.getLogger(__name__)


class HiddenStates(Protocol):
    """A way to run a model over a token tree."""

    def __call__(self, model: torch.nn.Module, tree: TokenTree, *, read: Tensor | None = None) -> Tensor:
        """[T, hidden size] the model's last hidden state of every token of the tree; or of those that `read`, [T] bool,
        marks, and anything of the others."""
        ...


def choose_forward(model: Any) -> HiddenStates:
    """The pass over shared prefixes where it gives what the model itself gives, else one sequence at a time.

    What is tried, in one row and in many, is the model at hand and not its name: sliding windows, recurrent layers and
    positions taken from the attention mask do not survive a prefix that is computed elsewhere, nor does every model hand on
    what its attention needs for anything but copied keys.
    """
    if has_full_attention(model):
        device = model.device.type
        if device == "cuda":
            if agree(model, whole_tree_states, gradients=True):
                return whole_tree_states
            logger.warning(
                "FlexAttention fails with %s (the log has its error at level DEBUG) or gives something else, so token trees are run "
                "in rows: exact, but slower",
                type(model).__name__,
            )
        if device == "cpu" and agree(model, *_in_few_and_many_rows(stem_saved=1)):
            return hidden_states_by_stems
        if agree(model, *_in_few_and_many_rows(stem_saved=None)):
            return hidden_states
    logger.warning(
        "%s does not keep plain full attention, so sequences are trained one by one: exact, but slower",
        type(model).__name__,
    )
    return separate_hidden_states


def _in_few_and_many_rows(stem_saved: int | None) -> list[HiddenStates]:
    return [
        partial(hidden_states, row_tokens=row_tokens, stem_saved=stem_saved, lead_tokens=0)
        for row_tokens in (ROW_TOKENS, 1)
    ]


_ALLOWED, _ALLOWED_IN_HALF = (1e-4, 1e-3), (0.1, 0.3)
"""How far states and gradients may be from the model's own, as a share of these; the second, in formats of two bytes, of which
tens of layers in another order of rounding make a tenth. Where sequences see each other, states are a fifth off, or more."""
_TRIED = ([7, 3, 11, 13, 1, 17, 8, 6], [7, 3, 4, 6, 8, 9, 10, 12, 14, 15], [7])
"""Two sequences that part early and go on for long, and one that both begin with."""


def agree(model: Any, *ways: HiddenStates, gradients: bool = False) -> bool:
    """Whether passes over shared prefixes give what the model itself gives; with `gradients`, also those of its first weights."""
    try:
        size = model.get_input_embeddings().num_embeddings
        tree = build_tree([[token % size for token in sequence] for sequence in _TRIED], min_saved=1)
        read = torch.arange(len(tree.ids)) % 2 == 0
        with torch.set_grad_enabled(gradients):
            expected = _with_gradient(model, separate_hidden_states(model, tree)[read])
            found = [_with_gradient(model, way(model, tree, read=read)[read]) for way in ways]
    except Exception:  # whatever a model raises on arguments that it does not know, another way suits it
        logger.debug("%s cannot run over shared prefixes", type(model).__name__, exc_info=True)
        return False
    allowed = _ALLOWED if expected[0].dtype.itemsize >= 4 else _ALLOWED_IN_HALF
    return all(
        bool((one - own).norm() <= share * own.norm())
        for each in found
        for one, own, share in zip(each, expected, allowed, strict=False)
    )


def _with_gradient(model: Any, states: Tensor) -> list[Tensor]:
    """The states; and where gradients are wanted, which kernels are compiled for, those of two weights."""
    # Of an adapter, the first alone has none before it is trained.
    weights = [weight for weight in model.parameters() if weight.requires_grad][:2]
    if not states.requires_grad or not weights:
        return [states]
    # Not all of them alike, and not their squares: behind a norm, these add up to the same whatever the weights are.
    pull = torch.arange(states.numel(), device=states.device).cos().view_as(states).to(states.dtype)
    found = torch.autograd.grad((states * pull).sum(), weights)
    return [states.detach(), torch.cat([gradient.flatten() for gradient in found])]


def separate_hidden_states(model: torch.nn.Module, tree: TokenTree, *, read: Tensor | None = None) -> Tensor:
    """The same by plain forward passes, one sequence at a time, for models that need their whole sequence at once."""
    device = next(model.parameters()).device
    place = torch.empty(len(tree.ids), dtype=torch.long)
    outputs, num_done = [], 0
    for index in range(len(tree.paths)):
        positions = torch.tensor(tree.positions(index))
        ids = torch.tensor(tree.ids)[positions].unsqueeze(0)
        outputs.append(model(input_ids=ids.to(device), use_cache=False).last_hidden_state[0])
        place[positions] = torch.arange(num_done, num_done + len(positions))
        num_done += len(positions)
    return torch.cat(outputs).index_select(0, place.to(device))


def hidden_states(
    model: torch.nn.Module,
    tree: TokenTree,
    row_tokens: int = ROW_TOKENS,
    *,
    read: Tensor | None = None,
    stem_saved: int | None = None,
    lead_tokens: int = LEAD_TOKENS,
) -> Tensor:
    """The model's last hidden state of every token of the tree, or of those that `read` marks: [T, hidden size].

    `stem_saved`, `lead_tokens`: see `passes`; stems are for models whose attention takes `above`.
    """
    device = next(model.parameters()).device
    order = torch.empty(len(tree.ids), dtype=torch.long)  # [T] the place of each token among those computed
    tree_keys, outputs, num_done = TreeKeys(), [], 0
    mlp = None if read is None else last_mlp(model)
    for part in passes(tree, row_tokens, stem_saved, lead_tokens):
        real = part.real.to(device)
        above = None if part.above is None else order[part.above].to(device)
        stems = [replace(stem, tokens=order[stem.tokens].to(device)) for stem in part.stems]
        past = tree_keys.past_of(above, stems, real)
        read_here = part.real if read is None else part.real[read[part.tokens]]
        with only_for(read_here.to(device), part.ids.shape, mlp):
            output = model(
                input_ids=part.ids.to(device),
                position_ids=part.positions.to(device),
                attention_mask=None if part.mask is None else part.mask.to(device),
                use_cache=True,
                **{cache_argument(model): past},
                **({"above": past} if stems else {}),
            )
        tree_keys.take_in(past)
        outputs.append(output.last_hidden_state.flatten(0, 1).index_select(0, real))
        order[part.tokens] = torch.arange(num_done, num_done + len(real))
        num_done += len(real)
    return torch.cat(outputs).index_select(0, order.to(device))


hidden_states_by_stems = partial(hidden_states, stem_saved=STEM_SAVED)
"""The same, with stems where they are worth it."""
