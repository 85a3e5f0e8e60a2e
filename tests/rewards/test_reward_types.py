import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.reward_types import (
    after_thinking,
    field_of,
    last_boxed,
    last_tagged,
    python_blocks,
    text_of_action,
    texts_of,
)
from rllm.types import Action


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{4}", "4"),
        (r"first \boxed{3}, no, \boxed{ 4 }.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{so \boxed{4}}}", "4"),
        (r"\fbox{4}", "4"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"{ \boxed{4}", "4"),
        (r"} \boxed{4}", "4"),
        (r"\boxed{4} and \boxed{5", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{4", None),
        (r"\boxed 4", None),
        ("boxed{4}", None),
        ("", None),
    ],
)
def test_last_box_with_balanced_braces_is_extracted(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@given(st.text(alphabet=r"\{}boxed 4", max_size=60), st.sampled_from(["4", r"\frac{1}{2}", r"\}x"]))
def test_box_at_the_end_is_found_after_any_text(noise: str, answer: str) -> None:
    if not noise.endswith("\\"):
        assert last_boxed(rf"{noise}\boxed{{{answer}}}") == answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [r"\boxed{" * 100_000, "{" * 200_000, "**" * 100_000, "<answer>" * 100_000, "```\n" * 50_000]
)
def test_long_output_is_parsed_in_linear_time(text: str) -> None:
    assert last_boxed(text) is None
    assert last_tagged(text, "answer") is None
    assert not any(python_blocks(text))


def test_only_text_after_the_reasoning_counts() -> None:
    assert after_thinking(r"<think>\boxed{3}</think>\boxed{4}") == r"\boxed{4}"
    assert after_thinking("no thought") == "no thought"


def test_last_complete_tag_is_extracted() -> None:
    assert last_tagged("<answer>1</answer> or <answer> 2 </answer> or <answer>3", "answer") == "2"
    assert last_tagged("</answer><answer>", "answer") is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```py3\nx = 1\n```\nor\n```Python\nx = 2\n```\n", "x = 2"),
        ("```python\nprint(2)\n```\nprints\n```\n2\n```", "print(2)"),
        ("```\nx = 1\n```\nor\n```\nx = 2\n```", "x = 2"),
        ("1. so\n   ```python\n   if x:\n       y = 1\n   ```", "if x:\n    y = 1"),
        ("```python\n  x = 1\n```", "  x = 1"),
        ("```python\nx = 1\n```\nprints\n```text\n1\n```", "x = 1"),
        ("```python\nnever closed\n```python\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nthen\n```python\nx = ", "x = 1"),
        ("1. so\n   ```python\nx = 1\n   ```", "x = 1"),
        ("```cpp\nint x;\n```", None),
        ("x = 1", None),
    ],
)
def test_last_closed_python_block_is_extracted(text: str, code: str | None) -> None:
    assert python_blocks(text)[-1:] == ([] if code is None else [code])


def test_missing_field_error_lists_the_existing_ones() -> None:
    with pytest.raises(
        RewardError, match=r"the math reward needs the task's field 'ground_truth'.*\['answer', 'question'\]"
    ):
        field_of({"question": "?", "answer": "4"}, "ground_truth", reward="the math reward")
    with pytest.raises(RewardError, match="a mapping, not str"):
        field_of("task", "ground_truth", reward="the math reward")


def test_ground_truths_are_texts_numbers_or_lists() -> None:
    np = pytest.importorskip("numpy")
    assert texts_of("4", "r") == ["4"]
    assert texts_of(4, "r") == ["4"]
    assert texts_of([4, "four", np.float64(4.5)], "r") == ["4", "four", "4.5"]
    assert texts_of(np.array(["a", "b"]), "r") == ["a", "b"]
    for unusable in [[], {"x": 1}, [None], object()]:
        with pytest.raises(RewardError, match="r needs a ground truth that is"):
            texts_of(unusable, "r")


def test_action_is_text_with_or_without_a_wrapper() -> None:
    assert text_of_action("x", "r") == text_of_action(Action("x"), "r") == "x"
    assert text_of_action(None, "r") == text_of_action(Action(None), "r") == ""
    with pytest.raises(RewardError, match="r judges text, and the action is of type dict"):
        text_of_action(Action({"name": "finish"}), "r")
