from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.inference.engine import SamplingParams
from rllm.inference.local import sampling
from rllm.inference.local.sampling import RowSettings, keep_top_k, keep_top_p, likeliest, sample, streams, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
DRAWS = 20_000


def draw(
    params: SamplingParams, logits: torch.Tensor = LOGITS, draws: int = DRAWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens 0, 1, 2, ... of one seeded answer, all from the same distribution."""
    settings = RowSettings.of([params] * draws, [42] * draws, len(logits), logits.device)
    return sample(logits.expand(draws, -1), settings, np.arange(draws, dtype=np.uint64))[:2]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), LOGITS.softmax(-1)),
        (SamplingParams(temperature=0.5), (LOGITS * 2).softmax(-1)),
        (SamplingParams(top_k=2), torch.tensor([2.0, 1.0, -torch.inf, -torch.inf, -torch.inf]).softmax(-1)),
        (SamplingParams(top_p=0.85), torch.tensor([2.0, 1.0, 0.5, -torch.inf, -torch.inf]).softmax(-1)),
    ],
)
def test_tokens_follow_the_distribution_of_their_logprobs(params: SamplingParams, expected: torch.Tensor) -> None:
    tokens, logprobs = draw(params)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected)[possible]).sum()
    assert chi_square < 20  # four degrees of freedom: exceeded once in 2,000 by a correct sampler
    torch.testing.assert_close(logprobs.float(), expected.log()[tokens], atol=1e-5, rtol=0)


def test_greedy_rows_report_the_logprob_of_the_model() -> None:
    rows = [SamplingParams(temperature=0, top_k=1), SamplingParams(temperature=2.0)]
    settings = RowSettings.of(rows, [1, 2], len(LOGITS), LOGITS.device)
    tokens, logprobs, _ = sample(LOGITS.expand(2, -1), settings, np.zeros(2, dtype=np.uint64))
    assert tokens[0] == 0
    assert logprobs[0].item() == pytest.approx(LOGITS.log_softmax(-1)[0].item(), abs=1e-6)
    assert logprobs[1].item() == pytest.approx((LOGITS / 2).log_softmax(-1)[tokens[1]].item(), abs=1e-6)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.5}, {"top_k": 2}, {"top_k": 2, "top_p": 1e-300}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1e-8])
def test_lowest_temperatures_take_the_most_probable_token(temperature: float, limits: dict[str, Any]) -> None:
    rows = [SamplingParams(temperature=temperature, **limits), SamplingParams()]
    settings = RowSettings.of(rows, [1, 2], 4, torch.device("cpu"))
    logits = torch.tensor([[-2e4, 0.0, 1e4, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    tokens, logprobs, _ = sample(logits, settings, np.zeros(2, dtype=np.uint64))
    assert (tokens[0], logprobs[0]) == (2, 0.0)
    assert logprobs[1].exp() == pytest.approx(0.25)


def test_top_logprobs_come_from_the_sampled_distribution() -> None:
    rows = [SamplingParams(temperature=2.0), SamplingParams(top_k=2), SamplingParams(temperature=0)]
    settings = RowSettings.of(rows, [1, 2, 3], len(LOGITS), LOGITS.device)
    tokens, logprobs, probabilities = sample(LOGITS.expand(3, -1), settings, np.zeros(3, dtype=np.uint64))
    warm, few, greedy = likeliest(probabilities, 9)
    assert [token for token, _ in warm] == [0, 1, 2, 3, 4]
    assert [value for _, value in warm] == pytest.approx((LOGITS / 2).log_softmax(-1).tolist(), abs=1e-6)
    assert [token for token, _ in few] == [0, 1], "tokens excluded by top-k are not alternatives"
    assert dict(greedy)[0] == pytest.approx(LOGITS.log_softmax(-1)[0].item(), abs=1e-6)
    for top, token, logprob in zip((warm, few, greedy), tokens.tolist(), logprobs.tolist(), strict=True):
        assert dict(top)[token] == logprob


def test_impossible_tokens_are_never_sampled() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[[7, 200]] = 0.0
    tokens, _ = draw(SamplingParams(), logits, draws=2_000)
    assert set(tokens.tolist()) == {7, 200}


def test_tokens_are_sampled_by_inversion() -> None:
    uniform = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25]).expand(len(uniform), -1)
    assert sampling.draw(probabilities, uniform).tolist() == [0, 0, 2, 2, 3, 3]


@given(st.integers(1, 300), st.integers(0, 9))
def test_blockwise_sampling_equals_sampling_from_all(vocabulary: int, seed: int) -> None:
    probabilities = (4 * torch.randn(50, vocabulary, generator=torch.Generator().manual_seed(seed))).softmax(-1)
    uniform = np.random.default_rng(seed).random(50)
    ends = probabilities.double().cumsum(-1)
    expected = torch.searchsorted(ends, torch.from_numpy(uniform)[:, None] * ends[:, -1:], right=True).squeeze(1)
    assert (sampling.draw(probabilities, uniform) == expected).float().mean() >= 0.98  # except for the last bits


def test_top_k_does_not_affect_unrestricted_rows() -> None:
    kept = keep_top_k(LOGITS.expand(2, -1), torch.tensor([1, 5]))
    assert kept.isfinite().sum(-1).tolist() == [1, 5]


def test_top_p_sorts_the_vocabulary_if_candidates_do_not_suffice() -> None:
    flat = torch.linspace(0, 1e-3, 1_000).unsqueeze(0)
    kept = keep_top_p(flat, torch.tensor([0.5]))
    assert kept.isfinite().sum().item() == pytest.approx(500, abs=2)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=200, unique=True),
    st.floats(0.05, 0.99),
)
def test_top_p_keeps_the_smallest_sufficient_set(values: list[float], top_p: float) -> None:
    logits = torch.tensor([values])
    kept = keep_top_p(logits, torch.tensor([top_p]))[0].isfinite()
    probabilities = logits[0].double().softmax(-1)
    mass = probabilities[kept].sum().item()
    assert mass >= top_p - 1e-5
    assert mass - probabilities[kept].min().item() < top_p + 1e-5
    if not kept.all():
        assert probabilities[kept].min() >= probabilities[~kept].max()


def test_uniforms_depend_only_on_seed_and_counter() -> None:
    seeds = streams(np.array([1, 2, 1], dtype=np.uint64))
    first = uniforms(seeds, np.array([0, 0, 1], dtype=np.uint64))
    assert len(set(first.tolist())) == 3
    assert uniforms(seeds[:1], np.zeros(1, dtype=np.uint64))[0] == first[0]
    many = uniforms(np.full(10_000, 3, dtype=np.uint64), np.arange(10_000, dtype=np.uint64))
    assert 0.0 <= many.min() < many.max() < 1.0
    assert many.mean() == pytest.approx(0.5, abs=0.01)


def test_logprob_of_a_greedy_row_does_not_depend_on_other_rows() -> None:
    logits = 3 * torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))

    def logprobs(other: SamplingParams) -> torch.Tensor:
        rows = [SamplingParams(temperature=0)] * 39 + [other]
        settings = RowSettings.of(rows, [0] * 40, logits.shape[1], logits.device)
        return sample(logits, settings, np.zeros(40, dtype=np.uint64))[1][:39]

    assert torch.equal(logprobs(SamplingParams(temperature=0)), logprobs(SamplingParams()))
