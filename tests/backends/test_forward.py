from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Llama4TextConfig, Llama4TextModel

from rllm.algorithms.batch import Batch
from rllm.algorithms.tree import TokenTree, build_tree
from rllm.backends.local import tree_attention, tree_rows
from rllm.backends.local.forward import (
    HiddenStates,
    agree,
    choose_forward,
    hidden_states,
    hidden_states_by_shared_prefixes,
    separate_hidden_states,
)
from rllm.backends.local.policy import Policy, Trunk
from rllm.inference.local.model_forward import use_grouped_attention

from .conftest import in_float64

Make = Callable[..., Any]
FAMILIES = pytest.mark.parametrize("family", ["Qwen3", "Llama"])

FORKED = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9], [8], [8, 1, 1, 1], [1, 2, 3, 4, 5]]
"""Forks at two depths, two roots, a sequence that begins another, and a duplicate."""


def naive_states(model: Any, sequence: list[int]) -> Tensor:
    states: Tensor = model(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
    return states


def naive_logprobs(model: Any, batch: Batch) -> Tensor:
    """Return the log-probability of each sampled token, by one plain forward pass for each sequence."""
    found = []
    for sequence in batch.sequences:
        logits = model(input_ids=torch.tensor([sequence.ids]), use_cache=False).logits[0] / batch.temperature
        every = torch.log_softmax(logits, dim=-1)
        found += [every[place - 1, sequence.ids[place]] for place in sequence.sampled_positions()]
    return torch.stack(found)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert (found[name] - gradient).abs().max().item() <= tolerance * max(scale, 1e-6), name


@FAMILIES
@pytest.mark.parametrize("row_tokens", [1, 100], ids=["node by node", "in one row"])
@pytest.mark.parametrize("min_saved", [1, 1000], ids=["shared", "apart"])
def test_hidden_states_equal_those_of_separate_sequences(
    make_model: Make, family: str, min_saved: int, row_tokens: int
) -> None:
    model = make_model(family).model
    tree = build_tree(FORKED, min_saved=min_saved)
    with torch.no_grad():
        states = hidden_states(model, tree, row_tokens)
        for index, sequence in enumerate(FORKED):
            torch.testing.assert_close(states[tree.positions(index)], naive_states(model, sequence), atol=1e-5, rtol=0)


@FAMILIES
def test_gradients_flow_through_shared_prefixes(make_model: Make, family: str) -> None:
    model = make_model(family).model
    tree = build_tree(FORKED, min_saved=1)
    width = model.config.hidden_size
    pulls = [torch.randn(len(sequence), width, generator=torch.Generator().manual_seed(7)) for sequence in FORKED]
    states = hidden_states(model, tree)
    found = gradients(
        model, sum(((states[tree.positions(i)] * pull).sum() for i, pull in enumerate(pulls)), start=torch.tensor(0.0))
    )
    separate = [(naive_states(model, sequence) * pull).sum() for sequence, pull in zip(FORKED, pulls, strict=True)]
    assert_same(found, gradients(model, torch.stack(separate).sum()))


@FAMILIES
def test_logprobs_over_the_tree_equal_plain_ones(
    make_backend: Make, make_model: Make, groups: Callable[..., Batch], family: str
) -> None:
    backend, batch = make_backend(make_model(family)), groups()
    batch.temperature = 0.7
    assert len(batch.tree.nodes) > len(batch), "prefixes are shared"
    found, _ = backend.policy.logprobs(batch)
    expected = naive_logprobs(backend.model, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    pull = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    assert_same(gradients(backend.model, (found * pull).sum()), gradients(backend.model, (expected * pull).sum()), 1e-4)


@FAMILIES
def test_tree_and_separate_sequences_agree_in_float64(
    make_model: Make, groups: Callable[..., Batch], family: str
) -> None:
    model = in_float64(make_model(family))
    batch = groups(3, 3)
    pull = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def results(forward_pass: HiddenStates) -> tuple[Tensor, dict[str, Tensor]]:
        policy = Policy.of(model, Trunk(module=model.base_model, hidden_states=forward_pass))
        found = torch.stack(policy.logprobs(batch, entropy_gradient=True))
        return found, gradients(model, (found * pull).sum())

    (shared, shared_gradients), (apart, apart_gradients) = results(hidden_states), results(separate_hidden_states)
    torch.testing.assert_close(shared, apart, atol=1e-10, rtol=0)
    assert_same(shared_gradients, apart_gradients, 1e-10)


@given(
    sequences=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=9), min_size=1, max_size=7),
    min_saved=st.sampled_from([1, 4]),
    row_tokens=st.sampled_from([1, 5, 12, 64]),
    shared_saved=st.sampled_from([None, 1]),
)
def test_any_tree_has_the_states_and_gradients_of_its_sequences(
    exact_model: Any,
    sequences: list[list[int]],
    min_saved: int,
    row_tokens: int,
    shared_saved: int | None,
) -> None:
    tree, model = build_tree(sequences, min_saved=min_saved), exact_model.model
    pull = torch.randn(len(tree.ids), 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shared = hidden_states(model, tree, row_tokens, shared_saved=shared_saved)
    apart = separate_hidden_states(model, tree)
    torch.testing.assert_close(shared, apart, atol=1e-10, rtol=0)
    found, expected = (
        torch.cat([gradient.flatten() for gradient in gradients(model, (states * pull).sum()).values()])
        for states in (shared, apart)
    )
    assert (found - expected).norm() <= 1e-10 * expected.norm()


@pytest.fixture(scope="module")
def exact_model(make_model: Make) -> Any:
    return in_float64(make_model("Llama"))


def test_rows_and_blocks_do_not_change_the_result(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree = make_model().model, build_tree([[7, 7, token, *range(token)] for token in range(9)], min_saved=2)
    with torch.no_grad():
        whole = hidden_states(model, tree)
        monkeypatch.setattr(tree_rows, "BLOCK_TOKENS", 20)
        for row_tokens in (1, 6, 12):
            torch.testing.assert_close(hidden_states(model, tree, row_tokens), whole, atol=1e-5, rtol=0)


def test_models_whose_attention_takes_no_tree_run_one_by_one(make_model: Make) -> None:
    model = make_model("Llama").model
    assert choose_forward(model) is hidden_states_by_shared_prefixes
    model.set_attn_implementation("eager")
    assert choose_forward(model) is separate_hidden_states


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pass_that_mixes_sequences_is_detected(make_model: Make, family: str, dtype: torch.dtype) -> None:
    def without_a_mask(model: Any, tree: TokenTree) -> Tensor:
        states: Tensor = model(
            input_ids=torch.tensor([tree.ids]), position_ids=tree_rows.token_depths(tree)[None]
        ).last_hidden_state[0]
        return states

    model = make_model(family).model.to(dtype)
    assert agree(model, hidden_states)
    assert not agree(model, without_a_mask)


def test_keys_are_copied_for_weights_in_bfloat16(make_model: Make) -> None:
    model = make_model("Qwen3").to(torch.bfloat16)
    assert choose_forward(model.model) is hidden_states


def test_keys_of_a_long_prompt_are_not_copied(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_float64(make_model("Qwen3")).model
    prompt, answers = [token % 50 for token in range(600)], [[10 + number] * 130 for number in range(4)]
    tree = build_tree([[*prompt, *answer] for answer in answers])
    pull = torch.randn(len(tree.ids), 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    num_keys = []

    def counted(query: Tensor, keys: Tensor, *args: Any, **options: Any) -> Tensor:
        num_keys.append(keys.shape[2])
        return scaled_dot_product_attention(query, keys, *args, **options)

    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", counted)
    shared, copies = hidden_states_by_shared_prefixes(model, tree), hidden_states(model, tree)
    assert num_keys == [600, 600, 600, 730, 600, 730], "the prompt in two layers; then the prompt and the answers"
    torch.testing.assert_close(shared, copies, atol=1e-10, rtol=0)
    assert_same(gradients(model, (shared * pull).sum()), gradients(model, (copies * pull).sum()), 1e-10)


def test_models_with_sliding_windows_run_one_by_one(
    make_backend: Make, make_model: Make, groups: Callable[..., Batch], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        backend = make_backend(make_model("Mistral", sliding_window=8))
    assert "one by one" in caplog.text
    batch = groups()
    torch.testing.assert_close(backend.score(batch), naive_logprobs(backend.model, batch).detach(), atol=1e-5, rtol=0)


def test_models_with_positions_from_the_cache_run_one_by_one() -> None:
    """Llama 4 scales its queries by the position, beyond a length that the tests do not reach."""
    config = Llama4TextConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_local_experts=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["full_attention"],
        no_rope_layers=[0],
    )
    model = Llama4TextModel(config).eval()
    use_grouped_attention(model)
    assert choose_forward(model) is separate_hidden_states
    config.attn_temperature_tuning = False
    assert choose_forward(model) is hidden_states_by_shared_prefixes


def test_separate_passes_have_the_gradients_of_shared_passes(make_model: Make) -> None:
    model, tree = make_model().model, build_tree(FORKED, min_saved=1)
    pull = torch.randn(len(tree.ids), model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    shared = gradients(model, (hidden_states(model, tree) * pull).sum())
    assert_same(gradients(model, (separate_hidden_states(model, tree) * pull).sum()), shared)
