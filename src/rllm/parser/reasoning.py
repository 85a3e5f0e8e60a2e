"""The model's text to reasoning and answer, for models that think between `<think>` and `</think>`."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class SplitText:
    """A model's text in its two parts."""

    reasoning: str
    answer: str


def split_reasoning(text: str, *, starts_open: bool = False) -> SplitText:
    """Split `<think>reasoning</think>answer`.

    Newlines around the tags are theirs: chat templates print them. `starts_open` says that the prompt already ended in
    `<think>`. Reasoning that was never closed leaves no answer; text that does not start with the tag is all answer.
    """
    body = text.lstrip()
    if body.startswith(OPEN):
        body = body[len(OPEN) :]
    elif not starts_open:
        return SplitText("", text)
    else:
        body = text
    reasoning, closed, answer = body.partition(CLOSE)
    return SplitText(reasoning.strip("\n"), answer.lstrip("\n") if closed else "")


def join_reasoning(reasoning: str, answer: str) -> str:
    """The text that `split_reasoning` splits so, as chat templates print it."""
    return f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{answer}" if reasoning else answer


def split_without_prompt(text: str) -> SplitText:
    """As `split_reasoning`, where the prompt is not known: it opened the thought that is closed here and was not opened here."""
    before, closed, _ = text.partition(CLOSE)
    return split_reasoning(text, starts_open=bool(closed) and OPEN not in before)
