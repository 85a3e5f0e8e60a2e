"""Tasks of benchmarks: from rows on the Hugging Face hub, one function for each schema, or generated at random.

A task has a `question` and a `ground_truth`, or what its scorer reads instead; documents to read are in `context`, and
the texts to choose from in `choices`. A function raises `KeyError` for a missing field and `ValueError` for a value
that it cannot read.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rllm.data.sources import READERS, reading
from rllm.errors import ConfigError
from rllm.types import JSONObject, Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


# Mathematics


def gsm8k_task(row: Task) -> Task:
    """Convert a row whose `answer` is a solution that ends with `#### 1,234`."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"there is no '####' in the answer {row['answer']!r}")
    return {"question": row["question"], "ground_truth": answer.strip().replace(",", "")}


def hendrycks_task(row: Task) -> Task:
    r"""Convert a row whose answer is in the last `\boxed{}` of its `solution`."""
    return {"question": row["problem"], "ground_truth": boxed_answer(row["solution"])}


def svamp_task(row: Task) -> Task:
    """Convert a row whose `Body` precedes its `Question`."""
    return {"id": row["ID"], "question": f"{row['Body'].strip()} {row['Question']}", "ground_truth": row["Answer"]}


def short_answer(question: str = "question", answer: str = "answer") -> Callable[[Task], Task]:
    """Return a conversion of rows with a question and an answer (or a list of accepted ones) in these fields."""
    return lambda row: {"question": row[question], "ground_truth": row[answer]}


def boxed_answer(solution: str) -> str:
    r"""Return the content of the last `\boxed{...}` or `\boxed ...`; escaped braces are text.

    Raises:
        ValueError: if there is none, or if it does not end.
    """
    *_, last = [None, *_BOX.finditer(solution)]
    if last is None:
        raise ValueError(f"there is no \\boxed{{}} in the solution {solution[-80:]!r}")
    rest = solution[last.end() :]
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip()
    depth = 0
    for match in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return rest[1 : match.start()].strip()
    raise ValueError(f"\\boxed{rest[:80]!r} has no closing brace")


# Multiple choice


def choice_task(question: str, choices: Sequence[str], right: int, **fields: object) -> Task:
    """Return a task that lists its choices below the question; `right` is the place of the right one, from 0."""
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return {
        **fields,
        "question": f"{question.strip()}\n\n{listed}",
        "choices": list(choices),
        "ground_truth": LETTERS[right],
    }


def gpqa_task(row: Task) -> Task:
    """Convert a row with one right and three wrong answers, in an order that depends on the question alone."""
    question, right = row["Question"], row["Correct Answer"].strip()
    choices = [right, *(row[f"Incorrect Answer {number}"].strip() for number in (1, 2, 3))]
    random.Random(question).shuffle(choices)
    return choice_task(question, choices, choices.index(right))


def numbered_choices(choices: str = "choices", answer: str = "answer") -> Callable[[Task], Task]:
    """Return a conversion of rows with choices in the one field, and in the other the place of the right one."""
    return lambda row: choice_task(row["question"], row[choices], row[answer])


def labelled_choices(question: str = "question") -> Callable[[Task], Task]:
    """Return a conversion of rows whose `answerKey` is one of the labels of their `choices`."""

    def convert(row: Task) -> Task:
        labels, texts = row["choices"]["label"], row["choices"]["text"]
        return choice_task(row[question], texts, labels.index(row["answerKey"]), id=row["id"])

    return convert


def hellaswag_task(row: Task) -> Task:
    """Convert a row with the beginning of a text, `ctx`, and four `endings`."""
    question = f"How does this text continue?\n\n{row['ctx']}"
    return choice_task(question, row["endings"], int(row["label"]))


def winogrande_task(row: Task) -> Task:
    """Convert a row whose `sentence` has a blank, `_`, for one of two options."""
    question = f"What belongs in the place of the underscore?\n\n{row['sentence']}"
    return choice_task(question, [row["option1"], row["option2"]], int(row["answer"]) - 1)


# Questions


def hotpotqa_task(row: Task) -> Task:
    """Convert a row whose `context` has a list of titles and one of sentence lists, to a list of documents."""
    documents = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    return {
        "id": row["id"],
        "question": row["question"],
        "ground_truth": row["answer"],
        "context": [{"title": title, "text": "".join(sentences).strip()} for title, sentences in documents],
    }


def squad_task(row: Task) -> Task:
    """Convert a row about one passage, with several accepted answers."""
    context = [{"title": row["title"].replace("_", " "), "text": row["context"]}]
    answers = row["answers"]["text"]
    return {"id": row["id"], "question": row["question"], "ground_truth": answers, "context": context}


def triviaqa_task(row: Task) -> Task:
    """Convert a row whose `answer` has a value and its aliases."""
    answers = list(dict.fromkeys([row["answer"]["value"], *row["answer"]["aliases"]]))
    return {"id": row["question_id"], "question": row["question"], "ground_truth": answers}


def boolq_task(row: Task) -> Task:
    """Convert a row about one passage whose `answer` is a boolean."""
    return {
        "question": f"{row['question'].strip().rstrip('?').capitalize()}? Answer yes or no.",
        "ground_truth": "yes" if row["answer"] else "no",
        "context": [{"title": "", "text": row["passage"]}],
    }


# Programs


def humaneval_task(row: Task) -> Task:
    """Convert a row whose `prompt` begins a function that `test` checks.

    Imports and helpers above that function belong to the program, even if the answer does not repeat them.
    """
    prompt, name = row["prompt"], row["entry_point"]
    above, _, _ = prompt.rpartition(f"def {name}(")
    return {
        "id": row["task_id"],
        "question": f"Complete this function.\n\n```python\n{prompt.strip()}\n```",
        "preamble": above,
        "test": row["test"],
        "entry_point": name,
    }


def mbpp_task(row: Task) -> Task:
    """Convert a row with a description in `text` and assertions in `test_list`, which the question shows."""
    tests = "\n".join(row["test_list"])
    return {
        "id": str(row["task_id"]),
        "question": f"{row['text'].strip()}\n\nThe program must pass these tests:\n\n```python\n{tests}\n```",
        "test": f"{row['test_setup_code']}\n{tests}".strip(),
    }


# Instructions


def ifeval_task(row: Task) -> Task:
    """Convert a row with a list of instruction ids and one of their arguments, in which absent ones are null."""
    pairs = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    return {
        "id": str(row["key"]),
        "question": row["prompt"],
        "instructions": [
            {"id": name, **{key: value for key, value in arguments.items() if value is not None}}
            for name, arguments in pairs
        ],
    }


# Function calls
#
# Each category of the Berkeley Function-Calling Leaderboard is a file with one JSON object a line, and its accepted
# calls are in a file of the same name in the folder `possible_answer`. Format:
# https://gorilla.cs.berkeley.edu/blogs/8_berkeley_function_calling_leaderboard.html

ANSWERS = "possible_answer"
_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Type names that JSON Schema lacks, and their replacements."""
_BFCL_ID = re.compile(r"(.*irrelevance|.*?)_\d")
_NOT_IN_NAMES = re.compile(r"[^\w-]")


def read_bfcl(path: Path) -> list[Task]:
    """Return the rows of a category, with accepted calls in `ground_truth`; those without need no call.

    Raises:
        ConfigError: if a file cannot be read, or rows that need calls have none.
    """
    rows, answers = _lines(path), path.parent / ANSWERS / path.name
    known = {row["id"]: row["ground_truth"] for row in _lines(answers)} if answers.is_file() else {}
    for row in rows:
        row.setdefault("ground_truth", known.get(row["id"], []))
        if not row["ground_truth"] and "irrelevance" not in row["id"]:
            raise ConfigError(f"{path}: row {row['id']!r} has no accepted calls in {answers}")
    return rows


def _lines(path: Path) -> list[Task]:
    with reading(path):
        found = [row for _, row in READERS[".jsonl"](path)]
    if not all(isinstance(row, dict) and "id" in row for row in found):
        raise ConfigError(f"{path}: each line is an object with an id in files of this benchmark")
    return found  # type: ignore[return-value]


def bfcl_task(row: Task) -> Task:
    """Convert a row: its only turn becomes `messages`, its functions become `tools`.

    Names are made valid for APIs, `a.b` to `a_b`, here and in the accepted calls.
    """
    if len(row["question"]) != 1:
        raise ValueError(f"row {row['id']!r} has {len(row['question'])} turns: only categories of one turn are scored")
    found = _BFCL_ID.match(row["id"])
    return {
        "id": row["id"],
        "category": found[1] if found else row["id"],
        "messages": row["question"][0],
        "tools": [{"type": "function", "function": _tool(function)} for function in row["function"]],
        "ground_truth": [{_name(name): accepted for name, accepted in call.items()} for call in row["ground_truth"]],
    }


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _tool(function: JSONObject) -> JSONObject:
    return {
        "name": _name(function["name"]),
        "description": function.get("description", ""),
        "parameters": _schema(function["parameters"]),
    }


def _schema(schema: JSONObject) -> JSONObject:
    """Return a schema, and all those in it, with the types of JSON Schema."""
    changed = dict(schema)
    if isinstance(schema.get("type"), str):
        changed["type"] = _BFCL_TYPES.get(schema["type"], schema["type"])
    if isinstance(schema.get("properties"), Mapping):
        changed["properties"] = {name: _schema(item) for name, item in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        changed["items"] = _schema(schema["items"])
    return changed


_MOST_REPEATS = 1000
"""Number of draws without a new task after which hardly any are left."""
T = TypeVar("T")
_TARGETS = range(10, 101)


def arithmetic_task(rng: random.Random, *, digits: int = 2, operators: int = 2) -> Task:
    """Return a question about numbers of up to `digits` digits, with up to `operators` of + - and *."""

    def number() -> int:
        return rng.randrange(10 ** rng.randint(1, digits))

    first = number()
    steps = [(rng.choice("+-*"), number()) for _ in range(rng.randint(1, operators))]
    expression = " ".join([str(first), *(f"{operator} {operand}" for operator, operand in steps)])
    return {"question": f"What is {expression}?", "ground_truth": str(value_of(first, steps))}


def value_of(first: int, steps: list[tuple[str, int]]) -> int:
    """Return the value of `first` followed by operators and numbers; products bind first."""
    terms = [first]
    for operator, number in steps:
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)


def countdown_task(rng: random.Random) -> Task:
    """Return a task whose target is computed from its numbers, each used once, so that it has a solution."""
    target = 0
    while target not in _TARGETS:  # new numbers each time: three ones, for example, cannot reach a target
        nums = sorted(rng.randint(1, 99) for _ in range(rng.choice((3, 4))))
        left = list(nums)
        while len(left) > 1:
            a, b = sorted((left.pop(rng.randrange(len(left))) for _ in range(2)), reverse=True)
            results = [a + b, a - b, a * b]
            if b and a % b == 0:
                results.append(a // b)
            left.append(rng.choice(results))
        [target] = left
    listed = f"{', '.join(map(str, nums[:-1]))} and {nums[-1]}"
    question = (
        f"Write an expression that equals {target}, with the numbers {listed}, each exactly once, "
        "and any of + - * / and parentheses."
    )
    return {"question": question, "target": target, "nums": nums, "ground_truth": str(target)}


def distinct_tasks(
    make: Callable[[random.Random, int], T], count: int, *, seed: int, key: Callable[[T], str] = json.dumps
) -> list[T]:
    """Return `count` distinct tasks, the same for the same seed; the first ones do not depend on `count`.

    Args:
        make: draws a task, given the number of tasks that exist already.
        count: number of tasks.
        seed: of the randomness.
        key: text in which distinct tasks differ.

    Raises:
        ConfigError: if there seem to be fewer.
    """
    rng = random.Random(seed)
    tasks: dict[str, T] = {}
    repeats = 0
    while len(tasks) < count:
        task = make(rng, len(tasks))
        repeats = 0 if tasks.setdefault(key(task), task) is task else repeats + 1
        if repeats == _MOST_REPEATS:
            raise ConfigError(f"{count} tasks requested, but hardly more than {len(tasks)} of them differ: use fewer")
    return list(tasks.values())
