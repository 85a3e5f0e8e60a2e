"""IFEval's instructions, one by one: a text that follows it, and one that does not.

Verdicts were compared with those of lm-evaluation-harness 0.4.13 over random texts; see the module for sentences.
"""

from __future__ import annotations

from typing import Any

import pytest

from rllm.errors import MissingDependencyError, RewardError
from rllm.rewards import ifeval_reward
from rllm.rewards.ifeval_reward import INSTRUCTIONS, count_sentences, ifeval_reward_fn, is_followed

LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["fig", "New York"]}, "Figs of new york.", "Figs of York."),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, "a.b A.B", "a.b axb"),
    ("keywords:frequency", {"keyword": "fig", "frequency": 2, "relation": "less than"}, "one fig", "fig, fig"),
    ("keywords:forbidden_words", {"forbidden_words": ["fig", "no"]}, "Figs are nobler.", "A FIG."),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        "quick Queen",
        "quick",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "See Dr. Fox.", "Yes. No."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\nOne.\n***\nTwo.", "One.\n\nTwo."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "a *** b *** c", "a ******b*** c"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a well-known", "two words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "First.\n\n\"So, it's done.",
        "First.\n\nSo it goes.\n\nThird.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [town]", "[name] of [town"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. One more", "Bye.\nPS: more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. More", "P.S. More"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "Two:\n* one\n  - two", "* one\n**two**"),
    ("detectable_format:constrained_response", {}, "So: My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", "*one* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na\nSection 2\nb",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\nText", "<<\nA title>>"),
    ("combination:two_responses", {}, "One ****** Two", "Same******Same"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "say IT. Done.", "Done. Say it."),
    ("startend:end_checker", {"end_phrase": "That is all."}, '"Well. That is all."', "That is all. Bye."),
    ("startend:quotation", {}, ' "Well." ', '"Well" he said'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "less than"},
        "The USA and the EU",
        "THE USA, I'D SAY",
    ),
    ("punctuation:no_comma", {}, "One and two", "One, two"),
    ("language:response_language", {"language": "de"}, "Der Hund läuft über die Straße.", "The dog crosses a street."),
    ("change_case:english_capital", {}, "THE DOG RUNS OVER THE STREET.", "The dog runs over the street."),
    ("change_case:english_lowercase", {}, "the dog runs over the street.", "der hund läuft über die straße."),
]


@pytest.mark.parametrize(("name", "arguments", "follows", "does_not"), CASES)
def test_instructions_are_checked(name: str, arguments: dict[str, Any], follows: str, does_not: str) -> None:
    if name in LANGUAGE:
        pytest.importorskip("langdetect")
    instruction = {"id": name, **arguments}
    assert is_followed(instruction, follows)
    assert not is_followed(instruction, does_not)
    assert not is_followed(instruction, " \n")


def test_all_25_kinds_are_tested() -> None:
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25


def test_loose_verdicts_ignore_an_introduction_and_emphasis() -> None:
    task = {"instructions": [{"id": "startend:quotation"}, {"id": "punctuation:no_comma"}]}
    verdict = ifeval_reward_fn(task, 'Sure, here it is:\n**"One and two"**')
    assert (verdict.reward, verdict.is_correct) == (0.0, False)
    expected = {"instructions": 2, "followed": 0, "followed_loose": 2, "all_followed_loose": 1.0}
    assert {name: verdict.metadata[name] for name in expected} == expected
    assert verdict.metadata["not_followed"] == ["startend:quotation", "punctuation:no_comma"]
    assert ifeval_reward_fn(task, '<think>One, two</think>"One and two"').is_correct


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two! Three?", 3),
        ('He said "No." Then he left.', 2),
        ("Mr. Fox lives at 3.5 Main St. with J. Smith, e.g. in summer.", 1),
        ("They left at 5 p.m. They came back.", 2),
        ("Wait... what? Well... Yes.", 3),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([{"id": "keywords:exist"}], "does not know 'keywords:exist'"),
        ([{"id": "keywords:existence", "words": []}], "the arguments of 'keywords:existence' are .'words'."),
        (
            [{"id": "length_constraints:number_words", "num_words": 3, "relation": "about"}],
            "the relation is 'about', not 'less than' or 'at least'",
        ),
    ],
)
def test_instruction_that_cannot_be_checked_is_reported(instructions: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        ifeval_reward_fn({"instructions": instructions}, "Text.")


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ifeval_reward, "find_spec", lambda name: None)
    ifeval_reward.check_installed.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"rllm\[ifeval\]"):
        is_followed({"id": "language:response_language", "language": "en"}, "Text.")


def test_long_text_of_punctuation_is_checked_quickly() -> None:
    for text in ("[" * 50_000, "<<" * 50_000, "*a\n" * 20_000, "." * 50_000, "\n" * 50_000 + "x"):
        for name, arguments, _, _ in CASES:
            if name not in LANGUAGE:
                is_followed({"id": name, **arguments}, text)
