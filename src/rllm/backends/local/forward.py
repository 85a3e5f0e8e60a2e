"""The training forward pass: the last hidden state of every token of a token tree.

The tree is cut into rows (`rows.py`), and each pass of the model runs many of them. A row's tokens attend to the keys and
values of the tokens above it, which are gathered from what earlier passes have produced; so every token is computed once,
any Hugging Face model with ordinary attention can be used as it is, and gradients flow through the shared prefixes to all
that share them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rllm.algorithms.tree import ROW_TOKENS, TokenTree, build_tree
from rllm.backends.local.rows import passes
from rllm.backends.local.tree_keys import TreeKeys
from rllm.inference.local.decoders import has_full_attention

logger = logging.getLogger(__name__)

HiddenStates: TypeAlias = Callable[[torch.nn.Module, TokenTree], Tensor]
"""`(model, tree) -> [T, hidden size]`: the model's last hidden state of every token of the tree."""


def choose_forward(model: Any) -> HiddenStates:
    """The pass over shared prefixes where it gives what the model itself gives, else one sequence at a time.

    What is tried, in one row and in many, is the model at hand and not its name: sliding windows, recurrent layers and positions taken from the
    attention mask do not survive a prefix that is computed elsewhere.
    """
    size = model.get_input_embeddings().num_embeddings
    stem = [token % size for token in (7, 3, 5, 2)]
    tree = build_tree([[*stem, 11 % size, 13 % size, 1], [*stem, 4 % size], stem[:3]], min_saved=1)
    if has_full_attention(model):
        try:
            with torch.no_grad():
                expected = separate_hidden_states(model, tree)
                errors = [hidden_states(model, tree, row_tokens) - expected for row_tokens in (1, len(tree.ids))]
            tolerance = 1e-4 if expected.dtype.itemsize >= 4 else 5e-2
            if torch.stack(errors).abs().max() <= tolerance * expected.abs().max():
                return hidden_states
        except Exception:  # whatever a model raises on arguments that it does not know, the other way suits it
            logger.debug("%s cannot run over shared prefixes", type(model).__name__, exc_info=True)
    logger.warning(
        "%s does not keep plain full attention, so sequences are trained one by one: exact, but slower",
        type(model).__name__,
    )
    return separate_hidden_states


def separate_hidden_states(model: torch.nn.Module, tree: TokenTree) -> Tensor:
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


def hidden_states(model: torch.nn.Module, tree: TokenTree, row_tokens: int = ROW_TOKENS) -> Tensor:
    """The model's last hidden state of every token of the tree: [T, hidden size]."""
    device = next(model.parameters()).device
    order = torch.empty(len(tree.ids), dtype=torch.long)  # [T] as the how many-th each token is computed
    tree_keys, outputs, num_done = TreeKeys(), [], 0
    for part in passes(tree, row_tokens):
        real = part.real.to(device)
        past = tree_keys.past_of(None if part.above is None else order[part.above].to(device), real)
        output = model(
            input_ids=part.ids.to(device),
            position_ids=part.positions.to(device),
            attention_mask=None if part.mask is None else part.mask.to(device),
            past_key_values=past,
            use_cache=True,
        )
        tree_keys.take_in(past)
        outputs.append(output.last_hidden_state.flatten(0, 1).index_select(0, real))
        order[part.tokens] = torch.arange(num_done, num_done + len(real))
        num_done += len(real)
    return torch.cat(outputs).index_select(0, order.to(device))
