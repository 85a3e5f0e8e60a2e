from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from rllm.algorithms.tree import build_tree
from rllm.backends.local.forward import (
    _WithinTree,
    agree,
    choose_forward,
    compiled,
    separate_hidden_states,
    whole_tree_states,
)
from rllm.backends.local.tree_rows import token_stops

from .conftest import in_float64

Make = Callable[..., Any]
SEQUENCES = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=9), min_size=1, max_size=7)
pytestmark = [  # without a GPU, FlexAttention stores all scores, and warns
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit.script_method:DeprecationWarning"
    ),  # raised by the compiler for GPUs
]
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def exact_model(make_model: Make) -> Any:
    return in_float64(make_model("Llama")).model


@pytest.mark.slow
@given(SEQUENCES, st.sampled_from([1, 4, 1000]))
def test_any_tree_has_the_states_of_its_sequences(exact_model: Any, sequences: list[list[int]], min_saved: int) -> None:
    tree = build_tree(sequences, min_saved=min_saved)
    with torch.no_grad():
        whole, apart = whole_tree_states(exact_model, tree), separate_hidden_states(exact_model, tree)
        torch.testing.assert_close(whole, apart, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_attention_crosses_block_boundaries(exact_model: Any) -> None:
    tree = build_tree([[*range(3, 100), *[token] * 90] for token in range(3, 6)])
    assert len(tree.ids) > 256
    with torch.no_grad():
        torch.testing.assert_close(
            whole_tree_states(exact_model, tree), separate_hidden_states(exact_model, tree), atol=1e-10, rtol=0
        )


LONG = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=5
)  # parent stem, tokens shared with it, and number of tokens after them


@given(LONG, st.sampled_from([1, 8, 1000]))
def test_blocks_equal_those_of_all_pairs_of_tokens(shapes: list[tuple[int, int, int]], min_saved: int) -> None:
    tree = build_tree([[stem] * shared + [3 + stem] * own for stem, shared, own in shapes], min_saved=min_saved)
    stops = token_stops(tree)
    found = _WithinTree(stops)._mask
    length = found.seq_lengths[0]
    ends = torch.cat([stops, torch.arange(len(stops), length) + 1])
    expected = create_block_mask(
        lambda _batch, _head, token, earlier: (earlier <= token) & (token < ends[earlier]),
        None,
        None,
        length,
        length,
        "cpu",
    )
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.slow
def test_gradients_flow_through_shared_prefixes(exact_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch computes the gradients on a CPU, too, but does not enable it, because it is slow.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    tree = build_tree([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9], [8], [8, 1, 1, 1]], min_saved=1)
    pull = torch.randn(len(tree.ids), 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def gradients(states: Tensor) -> Tensor:
        weights = list(exact_model.parameters())
        return torch.cat([gradient.flatten() for gradient in torch.autograd.grad((states * pull).sum(), weights)])

    found = gradients(whole_tree_states(exact_model, tree))
    expected = gradients(separate_hidden_states(exact_model, tree))
    assert (found - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trial_uses_gradients_above_rounding(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    model = make_model("Qwen3", num_layers=4)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)

    def half_the_gradient(model: Any, tree: Any) -> Tensor:
        states = whole_tree_states(model, tree)
        return states / 2 + states.detach() / 2

    assert agree(model.base_model, whole_tree_states, gradients=True)
    assert agree(model.base_model, half_the_gradient)
    assert not agree(model.base_model, half_the_gradient, gradients=True)


@pytest.mark.slow
def test_trees_of_many_lengths_have_kernels() -> None:
    kernels = []

    def kept(graph: Any, _inputs: Any) -> Any:
        kernels.append(graph)
        return graph.forward

    attend, lengths = compiled(kept), range(128, 128 * 12, 128)
    for length in (*lengths, *lengths):
        states = torch.randn(1, 2, length, 16)
        mask = create_block_mask(
            lambda _batch, _head, token, earlier: earlier <= token, None, None, length, length, "cpu"
        )
        with torch.no_grad():
            found = attend(states, states, states, block_mask=mask, scale=0.25)
        expected = scaled_dot_product_attention(states, states, states, is_causal=True)
        torch.testing.assert_close(found, expected)
    assert len(kernels) == len(lengths)


@ON_CUDA
def test_gpu_uses_whole_tree_attention(make_model: Make) -> None:
    model = make_model("Llama", head_dim=16).cuda().model  # FlexAttention requires heads of at least 16 numbers
    assert choose_forward(model) is whole_tree_states
