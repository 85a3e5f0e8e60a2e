"""Training forward pass: the last hidden state of every token of a token tree.

Where a model allows it, the whole tree is one sequence in one pass, and only attention is replaced: a token attends to
those above it. So each token is computed once, and a shared prefix gets the gradients of all sequences that share it.
There are three ways, and `choose_forward` takes the first that gives the model's own results:

- `whole_tree_states`: with FlexAttention, which is fast on CUDA.
- `hidden_states`: the tree is cut into rows (`tree_rows.py`), whose tokens attend to the keys above them, copied in
  front of their own or read in place as a shared prefix (`tree_attention.py`).
- `separate_hidden_states`: one sequence at a time, for other models.

Shapes: T tokens of the tree, H query heads, G key heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from rllm.algorithms.tree import ROW_TOKENS, TokenTree, build_tree
from rllm.backends.local.tree_attention import RowAttention
from rllm.backends.local.tree_rows import SHARED_SAVED, token_depths, token_stops
from rllm.inference.local.model_forward import has_full_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_BLOCK = 128
"""Tokens in one block of FlexAttention's mask."""
_KERNELS = 128
"""Bound on compiled kernels, larger than the number of powers of two that a tree's length may be."""


HiddenStates: TypeAlias = Callable[[torch.nn.Module, TokenTree], Tensor]
"""Way to run a model without its head over a token tree: return [T, hidden size] its last hidden states."""


def choose_forward(model: PreTrainedModel) -> HiddenStates:
    """Return the pass over shared prefixes where it gives what the model itself gives, else one sequence at a time.

    It is tried on the model at hand, in one row and in many, instead of relying on its name: sliding windows, recurrent
    layers and positions taken from the attention mask do not survive a prefix that is computed elsewhere, and not every
    model passes on the arguments that its attention needs for a shared prefix.
    """
    if has_full_attention(model):
        device = model.device.type
        if device == "cuda":
            if agree(model, whole_tree_states, gradients=True):
                return whole_tree_states
            logger.warning(
                "FlexAttention fails with %s (the log has its error at level DEBUG) or gives other results, so token "
                "trees are run in rows: exact, but slower",
                type(model).__name__,
            )
        if device == "cpu" and agree(model, *_in_few_and_many_rows(shared_saved=1)):
            return hidden_states_by_shared_prefixes
        if agree(model, *_in_few_and_many_rows(shared_saved=None)):
            return hidden_states
    logger.warning(
        "%s has attention that cannot be run over prefix trees, so sequences are trained one by one: exact, but slower",
        type(model).__name__,
    )
    return separate_hidden_states


def _in_few_and_many_rows(shared_saved: int | None) -> list[HiddenStates]:
    return [partial(hidden_states, row_tokens=row_tokens, shared_saved=shared_saved) for row_tokens in (ROW_TOKENS, 1)]


_ALLOWED, _ALLOWED_IN_HALF = (1e-4, 1e-3), (0.1, 0.3)
"""Relative error allowed for states and gradients. The second pair is for two-byte formats, in which tens of layers
that round in another order differ by a tenth. If sequences attend to each other, states are a fifth off, or more."""
_TRIED = ([7, 3, 11, 13, 1, 17, 8, 6], [7, 3, 4, 6, 8, 9, 10, 12, 14, 15], [7])
"""Two sequences that diverge early and are long, and one that is a prefix of both."""


def agree(model: PreTrainedModel, *ways: HiddenStates, gradients: bool = False) -> bool:
    """Return whether passes over shared prefixes give the model's own states and, if asked for, gradients."""
    try:
        size = model.get_input_embeddings().num_embeddings
        tree = build_tree([[token % size for token in sequence] for sequence in _TRIED], min_saved=1)
        with torch.set_grad_enabled(gradients):
            expected = _with_gradient(model, separate_hidden_states(model, tree))
            found = [_with_gradient(model, way(model, tree)) for way in ways]
    except Exception:  # a model may raise anything on arguments that it does not know; then another way suits it
        logger.debug("%s cannot run over shared prefixes", type(model).__name__, exc_info=True)
        return False
    allowed = _ALLOWED if expected[0].dtype.itemsize >= 4 else _ALLOWED_IN_HALF
    return all(
        bool((one - own).norm() <= share * own.norm())
        for each in found
        for one, own, share in zip(each, expected, allowed, strict=False)
    )


def _with_gradient(model: PreTrainedModel, states: Tensor) -> list[Tensor]:
    """Return the states and, if gradients are on, two weights' gradients: the backward pass has kernels of its own."""
    # Two, because the gradient of an adapter's first matrix is 0 before the adapter is trained.
    weights = [weight for weight in model.parameters() if weight.requires_grad][:2]
    if not states.requires_grad or not weights:
        return [states]
    # Neither the plain sum nor squares: after a norm, these add up to the same whatever the weights are.
    pull = torch.arange(states.numel(), device=states.device).cos().view_as(states).to(states.dtype)
    found = torch.autograd.grad((states * pull).sum(), weights)
    return [states.detach(), torch.cat([gradient.flatten() for gradient in found])]


def separate_hidden_states(model: torch.nn.Module, tree: TokenTree) -> Tensor:
    """Run one sequence at a time by plain forward passes, for models that need their whole sequence at once."""
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
    model: torch.nn.Module, tree: TokenTree, row_tokens: int = ROW_TOKENS, *, shared_saved: int | None = None
) -> Tensor:
    """Run the tree as one sequence, with attention in rows; see `HiddenStates`.

    `row_tokens` and `shared_saved` are passed to `tree_rows.blocks`.
    """
    device = next(model.parameters()).device
    return _run(model, tree, RowAttention(tree, device, row_tokens=row_tokens, shared_saved=shared_saved))


hidden_states_by_shared_prefixes = partial(hidden_states, shared_saved=SHARED_SAVED)
"""`hidden_states` that reads long shared prefixes in place."""


def whole_tree_states(model: torch.nn.Module, tree: TokenTree) -> Tensor:
    """Run the tree as one sequence, with FlexAttention (Dong et al. 2024); see `HiddenStates`.

    A token attends to those before it whose subtree has not ended, as within a row. As a block mask, this lets
    FlexAttention skip blocks of pairs without attention and never write the scores down, so that nothing is copied.
    """
    return _run(model, tree, _WithinTree(token_stops(tree).to(next(model.parameters()).device)))


def _run(model: torch.nn.Module, tree: TokenTree, attention: RowAttention | _WithinTree) -> Tensor:
    device = next(model.parameters()).device
    output = model(
        input_ids=torch.tensor([tree.ids], device=device),
        position_ids=token_depths(tree).unsqueeze(0).to(device),
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # accepted as it is and not used
        use_cache=False,
        above=attention,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


class _WithinTree:
    """Attention within a tree. Padding makes lengths powers of two, so that few kernels are compiled."""

    def __init__(self, stops: Tensor) -> None:
        """Build the mask from [T] the ends of the tokens' subtrees."""
        length = max(_BLOCK, 1 << (len(stops) - 1).bit_length())
        self._padding = length - len(stops)
        ends = torch.arange(1, length + 1, device=stops.device)  # padding sees itself
        ends[: len(stops)] = stops

        def sees(_batch: Tensor, _head: Tensor, token: Tensor, earlier: Tensor) -> Tensor:
            return (earlier <= token) & (token < ends[earlier])

        self._mask = BlockMask.from_kv_blocks(*_blocks(ends), BLOCK_SIZE=_BLOCK, mask_mod=sees)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [1, H, T, D]
        keys: Tensor,  # [1, G, T, D]
        values: Tensor,  # [1, G, T, D]
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return [1, H, T, D] the attention's output."""
        # Under autocast, norms leave queries and keys in a wider format than values.
        padded = (pad(states.to(values.dtype), (0, 0, 0, self._padding)) for states in (query, keys, values))
        attention = compiled() if query.device.type == "cuda" else flex_attention
        output: Tensor = attention(*padded, block_mask=self._mask, scale=scale, enable_gqa=True)
        return output[:, :, : query.shape[2]]


def _blocks(ends: Tensor) -> tuple[Tensor, ...]:
    """Return the blocks that each block sees in part (count, indices) and as a whole (count, indices).

    The result equals `create_block_mask`'s, but does not go through all pairs of tokens. `ends` [T] is the first later
    token that does not see each token.
    """
    first = torch.arange(0, len(ends), _BLOCK, device=ends.device)
    of_block = ends.view(-1, _BLOCK)
    earlier = first < first.unsqueeze(1)  # [block, block seen]
    whole = earlier & (of_block.amin(1) >= first.unsqueeze(1) + _BLOCK)
    part = earlier & (of_block.amax(1) > first.unsqueeze(1)) & ~whole
    part.fill_diagonal_(True)
    return tuple(number for seen in (part, whole) for number in _ordered(seen[None, None]))


def _ordered(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return [1, 1, n] the number of blocks that each sees, and [1, 1, n, n] these before all others."""
    return seen.sum(-1, dtype=torch.int32), seen.int().argsort(dim=-1, descending=True, stable=True).int()


@cache
def compiled(backend: str | Callable[..., object] = "inductor") -> Callable[..., Tensor]:
    """Return FlexAttention compiled for each length, with gradients and without.

    By default PyTorch compiles eight kernels, and then falls back to an implementation that writes all scores down.
    """
    attention = torch.compile(flex_attention, dynamic=False, backend=backend)
    patched: Callable[..., Tensor] = torch._dynamo.config.patch(recompile_limit=_KERNELS)(attention)
    return patched
