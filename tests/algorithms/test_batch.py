from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.batch import Aggregation, Batch, StepSpan, TokenSequence, token_weights
from rllm.errors import TokenMismatchError


def sequence(prompt: list[int], *turns: tuple[list[int], list[int]], logprob: float = -1.0) -> TokenSequence:
    """Return a sequence of the prompt and, for each turn, its sampled tokens and those inserted after them."""
    ids, spans = list(prompt), []
    for number, (sampled, inserted) in enumerate(turns):
        spans.append(StepSpan(step_id=f"s{number}", start=len(ids), stop=len(ids) + len(sampled)))
        ids += sampled + inserted
    num_sampled = sum(len(sampled) for sampled, _ in turns)
    return TokenSequence(ids=ids, spans=spans, logprobs=[logprob - place for place in range(num_sampled)])


TWO_TURNS = sequence([1, 2], ([11, 12], [3]), ([13], []))
ONE_TURN = sequence([1, 4], ([21], []), logprob=-7.0)


def test_batch_has_one_entry_per_sampled_token_in_order() -> None:
    batch = Batch.of([TWO_TURNS, ONE_TURN])
    assert batch.ids.tolist() == [11, 12, 13, 21]
    assert batch.sequence_of.tolist() == [0, 0, 0, 1]
    assert batch.sampler_logprobs.tolist() == [-1, -2, -3, -7]
    assert (len(batch), batch.num_tokens) == (2, 4)


def test_integer_logprobs_are_accepted() -> None:
    batch = Batch.of([TokenSequence(ids=[1, 2], spans=[StepSpan(step_id="s", start=1, stop=2)], logprobs=[0])])
    assert batch.sampler_logprobs.dtype == torch.float32


def test_batch_may_be_empty() -> None:
    batch = Batch.of([]).with_weights("token-mean")
    assert (len(batch), batch.num_tokens, list(batch.split(10))) == (0, 0, [])
    assert len(batch.select([])) == 0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
    ],
)
def test_weights_follow_the_aggregation(aggregation: Aggregation, expected: list[float]) -> None:
    assert Batch.of([TWO_TURNS, ONE_TURN]).with_weights(aggregation).weights.tolist() == pytest.approx(expected)


def test_trajectories_weigh_the_same_for_any_number_of_sequences() -> None:
    batch = Batch.of([TWO_TURNS, ONE_TURN, ONE_TURN])
    batch.trajectory_of = torch.tensor([4, 4, 4, 4, 7])
    weights = batch.with_weights("trajectory-mean-token-mean").weights
    assert weights.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 2])


def test_default_is_the_mean_over_tokens() -> None:
    assert Batch.of([TWO_TURNS, ONE_TURN]).weights.tolist() == [0.25] * 4


def test_weights_of_an_empty_batch_are_empty() -> None:
    aggregations: list[Aggregation] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
    for aggregation in aggregations:
        assert token_weights(torch.tensor([], dtype=torch.long), 0, aggregation).tolist() == []


def test_weights_of_one_sequence_follow_the_aggregation() -> None:
    two_tokens = torch.tensor([0, 0])
    assert token_weights(two_tokens, 1, "seq-mean-token-mean").tolist() == [0.5, 0.5]
    assert token_weights(two_tokens, 1, "seq-mean-token-sum").tolist() == [1.0, 1.0]


def test_select_keeps_the_fields_of_the_chosen_tokens() -> None:
    batch = Batch.of([ONE_TURN, TWO_TURNS, ONE_TURN], temperature=0.5).with_weights("seq-mean-token-mean")
    batch.advantages = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0])
    batch.old_logprobs = torch.tensor([-10.0, -20.0, -21.0, -22.0, -30.0])
    part = batch.select([1, 2])
    assert part.sequences == [TWO_TURNS, ONE_TURN]
    assert part.ids.tolist() == [11, 12, 13, 21]
    assert part.sequence_of.tolist() == [0, 0, 0, 1]
    assert part.advantages.tolist() == [2, 2, 2, 3]
    assert part.old_logprobs is not None
    assert part.old_logprobs.tolist() == [-20, -21, -22, -30]
    assert part.weights.tolist() == pytest.approx([1 / 9, 1 / 9, 1 / 9, 1 / 3]), "the shares of the whole batch"
    assert part.temperature == 0.5


def test_select_builds_its_own_tree() -> None:
    batch = Batch.of([ONE_TURN, TWO_TURNS])
    assert len(batch.tree.paths) == 2
    assert len(batch.select([1]).tree.paths) == 1


def lengths(*counts: int) -> Batch:
    """Return sequences of these lengths without common prefixes."""
    return Batch.of([sequence([start], ([start] * (count - 1), [])) for start, count in enumerate(counts)])


def test_split_fills_runs_up_to_the_limit() -> None:
    assert list(lengths(5, 5, 3, 8, 2).split(10)) == [[0, 1], [2], [3, 4]]


def test_sequences_with_different_first_tokens_share_nothing() -> None:
    batch = Batch.of([sequence([start, 2, 3, 4], ([5], [])) for start in range(2)])
    assert list(batch.split(9)) == [[0], [1]]


def test_sequence_longer_than_the_limit_is_a_run_of_its_own() -> None:
    assert list(lengths(2, 50, 2).split(10)) == [[0], [1], [2]]


def test_shared_prefixes_count_once() -> None:
    prompt = list(range(90))
    batch = Batch.of([sequence(prompt, ([100 + number], [])) for number in range(11)])
    assert list(batch.split(100)) == [list(range(11))[:10], [10]], "90 tokens of prompt, and 10 of answers"


def test_run_ends_early_if_little_is_recomputed() -> None:
    groups = [[*range(4), *range(10 * group, 10 * group + 6)] for group in range(1, 5)]
    batch = Batch.of([sequence(prompt, ([100 + number] * 10, [])) for prompt in groups for number in range(3)])
    # A group has 40 tokens, of which it shares 4 with the others; within it 10 are shared.
    assert list(batch.split(1000, 85)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], "two groups have 76 tokens"
    assert list(batch.split(1000, 50)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], (
        "a group repeats 4 of 40 tokens"
    )
    assert list(batch.split(1000, 20)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], (
        "within a group 10 of 20 repeat"
    )
    assert list(batch.split(30, 20)) == list(batch.split(30)), "an aim does not raise the limit"
    assert list(lengths(5, 5, 3, 8, 2).split(100, 10)) == [[0, 1], [2], [3, 4]], "nothing is repeated anywhere"


@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_split_yields_each_sequence_once_and_in_order(counts: list[int], limit: int) -> None:
    runs = list(lengths(*counts).split(limit))
    assert [index for run in runs for index in run] == list(range(len(counts)))
    assert all(len(run) == 1 or sum(counts[index] for index in run) <= limit for run in runs)


def spans(*bounds: tuple[int, int]) -> list[StepSpan]:
    return [StepSpan(step_id="s", start=start, stop=stop) for start, stop in bounds]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spans": spans((1, 3)), "logprobs": [-1.0]}, "2 sampled tokens have 1 log-probabilities"),
        ({"spans": spans((2, 4)), "logprobs": [-1.0, -1.0]}, "tokens 2 to 4 of 3"),
        ({"spans": spans((0, 1)), "logprobs": [-1.0]}, "follow a prompt"),
        ({"spans": spans((1, 3), (2, 3)), "logprobs": [-1.0] * 3}, "in order"),
    ],
)
def test_misaligned_sequence_is_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenMismatchError, match=message):
        TokenSequence(ids=[1, 2, 3], **fields)
