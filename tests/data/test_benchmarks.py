"""Every benchmark: a row made by hand in its dataset's schema, a right answer and a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.data.benchmarks import BENCHMARKS, messages_of, read_benchmark, read_benchmark_file
from rllm.errors import ConfigError
from rllm.registry import load_object
from rllm.rewards.scoring import as_reward_output

CHOICES = {"label": ["A", "B", "C", "D"], "text": ["iron", "wood", "glass", "wool"]}
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "gsm8k": ({"question": "2 + 3 apples?", "answer": "2+3=<<2+3=5>>5\n#### 5"}, r"\boxed{5}", "5"),
    "svamp": (
        {"ID": "chal-1", "Body": "There are 8 pens", "Question": "3 are lost. How many?", "Answer": "5.0"},
        r"8 - 3 = \boxed{5}",
        r"\boxed{8}",
    ),
    "math500": (
        {"problem": "Half of 1?", "solution": r"$\boxed{\frac{1}{2}}$", "answer": r"\frac{1}{2}", "unique_id": "1"},
        r"\boxed{0.5}",
        r"\boxed{2}",
    ),
    "hendrycks_math": (
        {"problem": "Half of 1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac12}$."},
        r"\boxed{1/2}",
        r"\boxed{2}",
    ),
    "aime24": ({"id": 60, "problem": "Find it.", "answer": "025", "year": "2024"}, r"\boxed{25}", r"\boxed{52}"),
    "aime25": ({"problem": "Find it.", "answer": "70", "id": "0"}, r"\boxed{70}", r"\boxed{71}"),
    "amc23": ({"id": 0, "question": "Find it.", "answer": 27.0, "url": ""}, r"\boxed{27}", r"\boxed{28}"),
    "mmlu": (
        {"question": "Which metal?", "subject": "x", "choices": CHOICES["text"], "answer": 0},
        "Answer: A",
        "Answer: B",
    ),
    "mmlu-pro": (
        {"question_id": 7, "question": "Which?", "options": list("klmnopqrst"), "answer": "J", "answer_index": 9},
        "So t.\nAnswer: J",
        "Answer: I",
    ),
    "arc-challenge": (
        {"id": "Q1", "question": "Which is clear?", "choices": {**CHOICES, "label": list("1234")}, "answerKey": "3"},
        "Answer: C",
        "Answer: D",
    ),
    "commonsense_qa": (
        {"id": "Q1", "question": "Which is clear?", "question_concept": "x", "choices": CHOICES, "answerKey": "C"},
        "Answer: C",
        "",
    ),
    "openbookqa": (
        {"id": "7-980", "question_stem": "Sheep give", "choices": CHOICES, "answerKey": "D"},
        "Answer: D",
        "Answer: C",
    ),
    "hellaswag": (
        {"ind": 1, "ctx": "He sits", "endings": ["a.", "down.", "up.", "it."], "label": "1", "activity_label": "x"},
        "Answer: B",
        "Answer: A",
    ),
    "winogrande": (
        {"sentence": "Ann thanked Eve because _ helped.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        "Answer: B",
        "Answer: A",
    ),
    "hotpotqa": (
        {
            "id": "5a7a",
            "question": "Which city?",
            "answer": "Oslo",
            "supporting_facts": {"title": ["Norway"], "sent_id": [0]},
            "context": {"title": ["Norway"], "sentences": [["It is cold.", " Its capital is Oslo."]]},
        },
        "Answer: Oslo.",
        "Answer: Bergen",
    ),
    "squad": (
        {
            "id": "1",
            "title": "University_of_Oslo",
            "context": "It began in 1811.",
            "question": "When?",
            "answers": {"text": ["1811", "in 1811"], "answer_start": [12, 9]},
        },
        "Answer: In 1811",
        "Answer: 1911",
    ),
    "triviaqa": (
        {
            "question": "Who?",
            "question_id": "tc_1",
            "answer": {"aliases": ["Mark Twain", "Clemens"], "value": "Mark Twain", "normalized_value": "mark twain"},
        },
        "Answer: Clemens",
        "Answer: Poe",
    ),
    "nq_open": ({"question": "who wrote it", "answer": ["Poe", "E. A. Poe"]}, "Answer: E. A. Poe", "Answer: Twain"),
    "boolq": ({"question": "is it cold", "answer": False, "passage": "It is hot."}, "Answer: No", "Answer: yes"),
}


def test_every_benchmark_has_a_test() -> None:
    assert set(BENCHMARKS) - set(CASES) == {"gpqa", "ifeval", "humaneval", "mbpp", "bfcl", "countdown", "arithmetic"}


def is_correct(name: str, task: dict[str, Any], answer: Any) -> bool | None:
    return as_reward_output(load_object(BENCHMARKS[name].reward), task, answer).is_correct


@pytest.mark.parametrize("name", CASES)
def test_row_becomes_a_question_with_a_score(name: str, tmp_path: Path) -> None:
    row, right, wrong = CASES[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [task] = read_benchmark_file(name, tmp_path / "rows.jsonl")
    assert is_correct(name, task, right) is True
    assert is_correct(name, task, wrong) is False
    [message] = messages_of(BENCHMARKS[name], task)
    assert task["question"] in message["content"]
    assert message["content"].endswith(BENCHMARKS[name].instruction)
    assert task["data_source"] == name


def test_documents_come_before_the_question() -> None:
    task = {"question": "Which city?", "context": [{"title": "Norway", "text": "Cold."}, {"title": "", "text": "Hot."}]}
    [message] = messages_of(BENCHMARKS["hotpotqa"], task)
    assert message["content"].startswith("Norway\nCold.\n\nHot.\n\nWhich city?\n\n")


def test_gpqa_choices_are_shuffled_per_question(tmp_path: Path) -> None:
    rows = [
        {"Question": f"Question {n}?", "Correct Answer": " right\n"}
        | {f"Incorrect Answer {k}": f"wrong {k}" for k in (1, 2, 3)}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = read_benchmark_file("gpqa", tmp_path / "rows.jsonl")
    assert tasks == read_benchmark_file("gpqa", tmp_path / "rows.jsonl")
    letters = [task["ground_truth"] for task in tasks]
    assert set(letters) == set("ABCD")
    assert f"{letters[0]}. right" in tasks[0]["question"]
    assert is_correct("gpqa", tasks[0], f"Answer: {letters[0]}")
    assert not is_correct("gpqa", tasks[0], "Answer: none")


def test_instructions_have_their_non_null_arguments(tmp_path: Path) -> None:
    row = {
        "key": 1000,
        "prompt": "Write two words, without commas.",
        "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
        "kwargs": [{"num_words": 3, "relation": "less than", "language": None}, {"num_words": None}],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [task] = read_benchmark_file("ifeval", tmp_path / "rows.jsonl")
    assert task["instructions"] == [
        {"id": "length_constraints:number_words", "num_words": 3, "relation": "less than"},
        {"id": "punctuation:no_comma"},
    ]
    assert messages_of(BENCHMARKS["ifeval"], task) == [{"role": "user", "content": row["prompt"]}]
    assert is_correct("ifeval", task, "Two words.")
    assert not is_correct("ifeval", task, "Two, words.")


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from math import floor\n\n\ndef half(n: int) -> int:\n    """Return half of n, rounded down."""\n',
    "canonical_solution": "    return floor(n / 2)\n",
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(-1) == -1\n",
    "entry_point": "half",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "code": "",
    "test_setup_code": "",
    "test_list": ["assert double(3) == 6", "assert double(0) == 0"],
    "challenge_test_list": [],
}


@pytest.mark.parametrize(
    ("name", "row", "program", "wrong"),
    [
        ("humaneval", HUMANEVAL, "def half(n):\n    return floor(n / 2)", "def half(n):\n    return int(n / 2)"),
        ("mbpp", MBPP, "def double(n):\n    return n + n", "def double(n):\n    return n * n"),
    ],
)
def test_programming_benchmarks_run_the_program(
    name: str, row: dict[str, Any], program: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [task] = read_benchmark_file(name, tmp_path / "rows.jsonl")
    assert is_correct(name, task, f"```python\n{program}\n```")
    assert not is_correct(name, task, f"```python\n{wrong}\n```")


def test_generated_benchmarks_equal_the_prepared_datasets() -> None:
    test, train = (read_benchmark("countdown", split) for split in ("test", "train"))
    assert (len(test), len(train)) == (100, 1000)
    assert not any(task in test for task in train)
    assert read_benchmark("arithmetic", limit=3) == read_benchmark("arithmetic")[:3]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "?"}, r"row 0 of .*rows.jsonl has no field 'answer', only question"),
        ("arc-challenge", {"id": "1", "question": "?", "choices": CHOICES, "answerKey": "E"}, "row 0 of .*'E' is not"),
        ("mmlu", {"question": "?", "choices": ["a"], "answer": "a"}, "row 0 of "),
    ],
)
def test_row_with_other_fields_is_rejected(name: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_benchmark_file(name, tmp_path / "rows.jsonl")


def test_unreachable_hub_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    with pytest.raises(ConfigError, match=r"'openai/gsm8k' on the Hugging Face hub, which cannot be reached: .*--data"):
        read_benchmark("gsm8k")


def test_every_row_of_the_registry_is_complete() -> None:
    for name, item in BENCHMARKS.items():
        assert (item.hub_id is None) != (item.generate is None), name
        assert item.about, name
        assert set(item.splits) <= {"test", "train"}, name
        assert "test" in item.splits, name
        assert {"temperature", "max_tokens"} <= set(item.sampling), name
        assert callable(load_object(item.reward))
