from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rllm.backends.local import logprobs as module
from rllm.backends.local.logprobs import Head, TokenLogprobs, energies, logprobs_and_entropy


@pytest.mark.parametrize("rows", [1, 7, 8, 29])
def test_chunked_logprobs_equal_the_full_log_softmax(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8 * 50)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50)
    hidden, targets = torch.randn(rows, 16, requires_grad=True), torch.randint(0, 50, (rows,))
    logprobs, entropy = logprobs_and_entropy(hidden, head, targets, temperature=1.3)
    every = torch.log_softmax(head(hidden) / 1.3, dim=-1)
    torch.testing.assert_close(logprobs, every[torch.arange(rows), targets])
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=every).entropy())
    assert not entropy.requires_grad
    (found,) = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
    (expected,) = torch.autograd.grad(every[torch.arange(rows), targets].sum(), hidden)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_entropy_gradient_equals_that_of_autograd(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_rows * 50)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, dtype=torch.float64)
    hidden = torch.randn(29, 16, requires_grad=True, dtype=torch.float64)
    _, entropy = logprobs_and_entropy(
        hidden, head, torch.zeros(29, dtype=torch.long), temperature=0.8, entropy_gradient=True
    )
    expected = torch.distributions.Categorical(logits=head(hidden) / 0.8).entropy()
    pull = torch.randn(29, dtype=torch.float64)
    (found,) = torch.autograd.grad((entropy * pull).sum(), hidden)
    (wanted,) = torch.autograd.grad((expected * pull).sum(), hidden)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("block_rows", [2, 100])
def test_tokens_of_one_state_share_its_distribution(
    chunk_rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_rows * 50)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block_rows * 50)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, dtype=torch.float64)
    hidden = torch.randn(7, 16, requires_grad=True, dtype=torch.float64)
    state_of = torch.tensor([5, 0, 0, 6, 2, 5, 0, 1, 4])  # none of 3; not in order
    targets = torch.tensor([1, 7, 7, 2, 49, 1, 0, 3, 3])  # some with equal ids, from the same state and from others
    each = Recorded(50, head)
    pulls = torch.randn(2, 9, dtype=torch.float64)
    for pulled in (pulls, pulls * torch.tensor([[1], [0]]), pulls * torch.tensor([[0], [1]])):
        each.sizes.clear()
        found = logprobs_and_entropy(hidden, each, targets, state_of=state_of, temperature=0.7, entropy_gradient=True)
        assert sum(each.sizes) == 7 * 50, "a row of logits for each state"
        expected = logprobs_and_entropy(hidden[state_of], head, targets, temperature=0.7, entropy_gradient=True)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        gradients, others = (
            torch.autograd.grad((torch.stack(values) * pulled).sum(), (hidden, head.weight))
            for values in (found, expected)
        )
        torch.testing.assert_close(gradients, others, atol=1e-12, rtol=0)


def test_entropy_matches_hand_computed_values() -> None:
    head = torch.nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [0.0], [0.0], [1.0]]))
    hidden = torch.tensor([[0.0], [math.log(2)]])
    _, entropy = logprobs_and_entropy(hidden, head, torch.tensor([0, 0]), temperature=1.0)
    uniform, skewed = math.log(4), 3 * 0.2 * math.log(5) + 0.4 * math.log(2.5)
    assert entropy.tolist() == pytest.approx([uniform, skewed])


class Recorded(torch.nn.Module):
    """A head that records the sizes of its calls."""

    def __init__(self, vocabulary: int, linear: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.linear = linear or torch.nn.Linear(4, vocabulary)
        self.out_features = vocabulary
        self.sizes: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.linear(rows)
        self.sizes.append(logits.numel())
        return logits


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logits_are_computed_chunk_by_chunk(entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1000)
    head = Recorded(vocabulary=30)
    kept: list[int] = []

    def remember(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        hidden = torch.randn(500, 4, requires_grad=True)
        logprobs, entropy = logprobs_and_entropy(
            hidden, head, torch.zeros(500, dtype=torch.long), temperature=1.0, entropy_gradient=entropy_gradient
        )
    forward_sizes = list(head.sizes)
    (logprobs + entropy).sum().backward()
    assert max(forward_sizes) <= 1000
    assert sum(forward_sizes) == 500 * 30
    assert sum(head.sizes) == 2 * 500 * 30, "computed again in the backward pass"
    assert max(kept) <= 500 * 4, "no logits are kept for the backward pass"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_size_does_not_change_results(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    targets = torch.arange(11) % 7

    def outcome() -> list[Tensor]:
        logprobs, spread = TokenLogprobs.apply(logits * 1, torch.arange(11), targets, 0.5, True)
        (gradient,) = torch.autograd.grad((logprobs + 3 * spread).sum(), logits)
        return [logprobs, spread, gradient]

    whole = outcome()
    assert [found.dtype for found in whole] == [torch.float32, torch.float32, dtype]
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3 * 7)
    assert all(map(torch.equal, outcome(), whole))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_gradients_equal_those_of_autograd(scale: float) -> None:
    logits = scale * torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, targets = torch.tensor([0, 1, 1, 1, 3, 4]), torch.tensor([0, 3, 6, 3, 2, 2])
    pulls = torch.linspace(-1, 2, 6, dtype=torch.float64), torch.linspace(3, -2, 5, dtype=torch.float64)
    every = (logits.requires_grad_() / 0.8).log_softmax(-1)
    expected = every[rows, targets], -(every.exp() * every).sum(-1)
    found = TokenLogprobs.apply(logits * 1, rows, targets, 0.8, True)
    torch.testing.assert_close(found, expected)
    gradients, others = (
        torch.autograd.grad([(value * pull).sum() for value, pull in zip(values, pulls, strict=True)], logits)
        for values in (found, expected)
    )
    torch.testing.assert_close(gradients, others)


def test_impossible_token_has_a_finite_logprob() -> None:
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    logprobs, spread = TokenLogprobs.apply(logits * 1, torch.tensor([0]), torch.tensor([0]), 1.0, True)
    logprobs.sum().backward()
    assert (logprobs.item(), spread.item()) == (-500.0, 0.0)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_energies_are_squared_gradient_norms(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_rows * 50)
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 50)
    head, hidden = Head(linear=linear, out_features=50), torch.randn(3, 16)
    targets, state_of = torch.tensor([5, 6, 7, 5]), torch.tensor([0, 2, 1, 0])
    found = energies(hidden, head, targets, state_of=state_of, temperature=1.0)
    for target, state, value in zip(targets, state_of, found, strict=True):
        logits = head(hidden[state : state + 1])[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(logits.log_softmax(-1)[target], logits)
        assert value.item() == pytest.approx(slope.square().sum().item(), abs=1e-5)
