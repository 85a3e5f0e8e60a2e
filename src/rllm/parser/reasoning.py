"""The model's text to reasoning and answer, for models that think between `<think>` and `</think>`."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class SplitText:
    """A model's text in its two parts."""

    reasoning: str
    answer: str


def split_reasoning(text: str, *, starts_open: bool = False, tags: tuple[str, str] = (OPEN, CLOSE)) -> SplitText:
    """Split `<think>reasoning</think>answer`.

    Newlines around the tags belong to the tags: chat templates print them. `starts_open` means that the prompt already
    ended in `<think>`. Reasoning that was never closed leaves no answer; text that does not start with the tag is all
    answer. `tags` are those of another family.
    """
    opening, closing = tags
    body = text.lstrip()
    if body.startswith(opening):
        body = body[len(opening) :]
    elif not starts_open:
        return SplitText("", text)
    else:
        body = text
    reasoning, closed, answer = body.partition(closing)
    return SplitText(reasoning.strip("\n"), answer.lstrip("\n") if closed else "")


def join_reasoning(reasoning: str, answer: str) -> str:
    """Return the text that `split_reasoning` splits into these parts, as chat templates print it."""
    return f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{answer}" if reasoning else answer


def split_without_prompt(text: str) -> SplitText:
    """Split a text whose prompt is unknown: it may have opened a thought that is closed in the text."""
    before, closed, _ = text.partition(CLOSE)
    return split_reasoning(text, starts_open=bool(closed) and OPEN not in before)
