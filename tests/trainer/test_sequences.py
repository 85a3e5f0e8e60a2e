from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.batch import StepSpan, TokenSequence
from rllm.errors import TokenMismatchError
from rllm.trainer.sequences import sequences_of
from rllm.types import Step


def step(name: str, prompt: list[int], answer: list[int]) -> Step:
    """Return a step whose tokens have the log-probabilities -id."""
    return Step(id=name, prompt_ids=prompt, response_ids=answer, logprobs=[-float(token) for token in answer])


def span(name: str, start: int, stop: int) -> StepSpan:
    return StepSpan(step_id=name, start=start, stop=stop)


FIRST = step("first", [1, 2], [3, 4])


def test_turns_of_a_conversation_are_one_sequence() -> None:
    second = step("second", [1, 2, 3, 4, 50, 51], [6])
    third = step("third", [1, 2, 3, 4, 50, 51, 6, 52], [8, 9])
    assert sequences_of([FIRST, second, third]) == [
        TokenSequence(
            ids=[1, 2, 3, 4, 50, 51, 6, 52, 8, 9],
            spans=[span("first", 2, 4), span("second", 6, 7), span("third", 8, 10)],
            logprobs=[-3, -4, -6, -8, -9],
        )
    ]


def test_answer_may_directly_continue_another() -> None:
    (sequence,) = sequences_of([FIRST, step("more", [1, 2, 3, 4], [5])])
    assert sequence.spans == [span("first", 2, 4), span("more", 4, 5)]


def test_edited_history_starts_a_new_sequence() -> None:
    edited = step("edited", [1, 2, 3, 9, 50], [6])
    assert [item.ids for item in sequences_of([FIRST, edited])] == [[1, 2, 3, 4], [1, 2, 3, 9, 50, 6]]


def test_answer_rendered_differently_starts_a_new_sequence() -> None:
    shortened = step("shortened", [1, 2, 3], [6])  # the template dropped the last sampled token
    assert [item.spans for item in sequences_of([FIRST, shortened])] == [
        [span("first", 2, 4)],
        [span("shortened", 3, 4)],
    ]


def test_two_continuations_of_a_step_train_its_tokens_once() -> None:
    one, other = step("one", [1, 2, 3, 4, 50], [6]), step("other", [1, 2, 3, 4, 60], [7])
    assert sequences_of([FIRST, one, other]) == [
        TokenSequence(ids=[1, 2, 3, 4, 50, 6], spans=[span("first", 2, 4), span("one", 5, 6)], logprobs=[-3, -4, -6]),
        TokenSequence(ids=[1, 2, 3, 4, 60, 7], spans=[span("other", 5, 6)], logprobs=[-7]),
    ]


def test_step_continues_the_longest_sequence_it_extends() -> None:
    branch = step("branch", [1, 2], [3, 4, 5])
    joined = step("joined", [1, 2, 3, 4, 5, 50], [6])
    assert [[item.step_id for item in found.spans] for found in sequences_of([FIRST, branch, joined])] == [
        ["first"],
        ["branch", "joined"],
    ]


def test_equal_answers_to_one_prompt_are_separate_sequences() -> None:
    assert len(sequences_of([FIRST, step("twin", [1, 2], [3, 4])])) == 2


def test_step_out_of_order_is_a_separate_sequence_and_trained_once() -> None:
    second = step("second", [1, 2, 3, 4, 50], [6])
    assert [item.spans for item in sequences_of([second, FIRST])] == [[span("second", 5, 6)], [span("first", 2, 4)]]


def test_steps_without_tokens_are_skipped() -> None:
    assert sequences_of([Step(), FIRST, Step(prompt_ids=[1])]) == sequences_of([FIRST])
    assert sequences_of([]) == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Step(id="x", prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0]), "step x: 2 sampled ids but 1 log-prob"),
        (Step(id="x", prompt_ids=[1], response_ids=[2]), "1 sampled ids but 0 log-probabilities"),
        (Step(id="x", response_ids=[2], logprobs=[-1.0]), "step x: 1 sampled ids after an empty prompt"),
    ],
)
def test_misaligned_tokens_stop_the_run(broken: Step, message: str) -> None:
    with pytest.raises(TokenMismatchError, match=message):
        sequences_of([FIRST, broken])


def test_demonstrations_have_no_logprobs() -> None:
    shown = [Step(id="one", prompt_ids=[1], response_ids=[2]), step("two", [1, 2, 3], [4])]
    (sequence,) = sequences_of(shown, demonstrated=True)
    assert sequence == TokenSequence(ids=[1, 2, 3, 4], spans=[span("one", 1, 2), span("two", 3, 4)], logprobs=None)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(-1, 5), TOKENS, TOKENS), max_size=7))
def test_every_sampled_token_is_trained_once_after_its_prompt(
    turns: list[tuple[int, list[int], list[int]]],
) -> None:
    """Each turn continues an earlier one, or none, with some inserted and some sampled tokens."""
    steps: list[Step] = []
    for number, (earlier, inserted, answer) in enumerate(turns):
        before = steps[earlier] if 0 <= earlier < len(steps) else Step()
        steps.append(step(str(number), before.prompt_ids + before.response_ids + inserted, answer))
    found = {}
    for sequence in sequences_of(steps):
        logprobs = iter(sequence.logprobs)
        for item in sequence.spans:
            ids = sequence.ids
            taken = [next(logprobs) for _ in range(item.start, item.stop)]
            assert item.step_id not in found
            found[item.step_id] = (ids[: item.start], ids[item.start : item.stop], taken)
    assert found == {item.id: (item.prompt_ids, item.response_ids, item.logprobs) for item in steps}
