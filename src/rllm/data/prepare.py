"""Known datasets, generated or from the Hugging Face hub: `python -m rllm.data.prepare countdown --train 500`.

Each `prepare_...` function registers the splits of one dataset and returns them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from typing import Literal

from rllm.data.dataset import Dataset, DatasetRegistry
from rllm.data.sources import read_hub
from rllm.errors import ConfigError, RLLMError
from rllm.types import Task

logger = logging.getLogger("rllm.data.prepare")  # as a program, `__name__` is `__main__`

_MOST_REPEATS = 1000
"""Draws without a new task after which there are hardly any left."""
_TARGETS = range(10, 101)
GSM8K = "openai/gsm8k"
HENDRYCKS_MATH = "EleutherAI/hendrycks_math"
MATH500 = "HuggingFaceH4/MATH-500"
HOTPOTQA = "hotpotqa/hotpot_qa"
MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def prepare_arithmetic(
    *, train: int = 1000, test: int = 100, seed: int = 0, digits: int = 2, operators: int = 2
) -> list[Dataset]:
    """Register `arithmetic`: numbers have up to `digits` digits, and questions up to `operators` of + - and *."""
    for name, value in (("digits", digits), ("operators", operators)):
        if value < 1:
            raise ConfigError(f"{name}={value}: use at least 1")

    def number(rng: random.Random) -> int:
        return rng.randrange(10 ** rng.randint(1, digits))

    def arithmetic_task(rng: random.Random) -> Task:
        first = number(rng)
        steps = [(rng.choice("+-*"), number(rng)) for _ in range(rng.randint(1, operators))]
        expression = " ".join([str(first), *(f"{operator} {operand}" for operator, operand in steps)])
        return {"question": f"What is {expression}?", "ground_truth": str(value_of(first, steps))}

    return register_random("arithmetic", arithmetic_task, train=train, test=test, seed=seed)


def value_of(first: int, steps: list[tuple[str, int]]) -> int:
    """Return the value of `first` followed by operators and numbers; products bind first."""
    terms = [first]
    for operator, number in steps:
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)


def prepare_countdown(*, train: int = 1000, test: int = 100, seed: int = 0) -> list[Dataset]:
    """Register `countdown`: reach a target by arithmetic with three or four numbers. Each task can be solved."""
    return register_random("countdown", countdown_task, train=train, test=test, seed=seed)


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


def prepare_grid_world(
    *, train: int = 1000, test: int = 100, seed: int = 0, size: int = 4, p: float = 0.8, is_slippery: bool = False
) -> list[Dataset]:
    """Register `grid_world`: squares of `size` cells a side, each of which is ice with probability `p`.

    A task has the seed of its map. The environment draws maps from it until one has a way to the goal.
    """
    if not 2 <= size <= 64:
        raise ConfigError(f"size={size}: use 2 to 64")
    if not 0 <= p <= 1:
        raise ConfigError(f"p={p}: use a probability, 0 to 1")
    # On slippery ice one move in three goes where it was meant to.
    max_steps = (12 if is_slippery else 4) * size

    def grid_world_task(rng: random.Random) -> Task:
        return {"seed": rng.randrange(2**31), "size": size, "p": p, "is_slippery": is_slippery, "max_steps": max_steps}

    return register_random("grid_world", grid_world_task, train=train, test=test, seed=seed)


def prepare_gsm8k(*, train: int = 0, test: int = 0) -> list[Dataset]:
    """Register `gsm8k`, grade-school word problems (https://arxiv.org/abs/2110.14168), from the Hugging Face hub.

    At most so many rows of each split, or all for 0.
    """
    return [
        DatasetRegistry.register_dataset(
            "gsm8k", hub_tasks(gsm8k_task, GSM8K, subset="main", split=split, limit=limit), split=split, source=GSM8K
        )
        for split, limit in (("train", train), ("test", test))
    ]


def gsm8k_task(row: Task) -> Task:
    """Convert a hub row, whose `answer` is a solution that ends with `#### 1,234`.

    Raises:
        ValueError: if it ends differently.
    """
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"there is no '####' in the answer {row['answer']!r}")
    return {"question": row["question"], "ground_truth": answer.strip().replace(",", ""), "data_source": "gsm8k"}


def prepare_math(*, train: int = 0, test: int = 0) -> list[Dataset]:
    """Register `hendrycks_math` (split train) and `math500` (split test), competition mathematics, from the hub.

    At most so many rows of each, or all for 0. The problems are those of https://arxiv.org/abs/2103.03874, with mixed
    subjects; the choice of 500 is that of https://arxiv.org/abs/2305.20050.
    """
    problems = [
        task
        for subject in MATH_SUBJECTS
        for task in hub_tasks(hendrycks_task, HENDRYCKS_MATH, subset=subject, split="train", limit=train)
    ]
    random.Random(0).shuffle(problems)
    held_out = hub_tasks(math500_task, MATH500, split="test", limit=test)
    return [
        DatasetRegistry.register_dataset(
            "hendrycks_math", problems[: train or None], split="train", source=HENDRYCKS_MATH
        ),
        DatasetRegistry.register_dataset("math500", held_out, split="test", source=MATH500),
    ]


def hendrycks_task(row: Task) -> Task:
    r"""Convert a hub row, whose answer is in the last `\boxed{}` of its `solution`.

    Raises:
        ValueError: if there is no such answer.
    """
    answer = boxed_answer(row["solution"])
    return {"question": row["problem"], "ground_truth": answer, "data_source": "hendrycks_math"}


def math500_task(row: Task) -> Task:
    """Convert a hub row with a `problem` and an `answer`."""
    return {"question": row["problem"], "ground_truth": row["answer"], "data_source": "math500"}


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


def prepare_hotpotqa(*, train: int = 10_000, test: int = 1_000) -> list[Dataset]:
    """Register `hotpotqa`, questions over several documents (https://arxiv.org/abs/1809.09600), from the hub.

    At most so many rows of each split, or all for 0, which is half a gigabyte. Each question has ten documents, of
    which two hold the answer. The test split is the hub's validation split: the hub's own test split has no answers.
    """
    return [
        DatasetRegistry.register_dataset(
            "hotpotqa",
            hub_tasks(hotpotqa_task, HOTPOTQA, subset="distractor", split=hub_split, limit=limit),
            split=split,
            source=HOTPOTQA,
        )
        for split, hub_split, limit in (("train", "train", train), ("test", "validation", test))
    ]


def hotpotqa_task(row: Task) -> Task:
    """Convert a hub row, whose `context` has a list of titles and one of sentence lists, to a list of documents.

    Raises:
        ValueError: if there is not one list for each title.
    """
    documents = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    return {
        "id": row["id"],
        "question": row["question"],
        "ground_truth": row["answer"],
        "context": [{"title": title, "text": "".join(sentences).strip()} for title, sentences in documents],
        "data_source": "hotpotqa",
    }


def register_random(
    name: str, make: Callable[[random.Random], Task], *, train: int, test: int, seed: int
) -> list[Dataset]:
    """Register so many distinct train and test tasks. The test tasks depend on `test` and `seed` alone."""
    for split, count in (("train", train), ("test", test)):
        if count < 1:
            raise ConfigError(f"{split}={count}: use at least 1 task")
    tasks = distinct_tasks(make, test + train, seed=seed)
    splits: tuple[tuple[Literal["train", "test"], list[Task]], ...] = (("train", tasks[test:]), ("test", tasks[:test]))
    return [DatasetRegistry.register_dataset(name, rows, split=split, seed=seed) for split, rows in splits]


def distinct_tasks(make: Callable[[random.Random], Task], count: int, *, seed: int) -> list[Task]:
    """Return `count` distinct tasks, the same for the same seed; the first ones do not depend on `count`.

    Raises:
        ConfigError: if there seem to be fewer.
    """
    rng = random.Random(seed)
    tasks: dict[str, Task] = {}
    repeats = 0
    while len(tasks) < count:
        task = make(rng)
        repeats = 0 if tasks.setdefault(json.dumps(task), task) is task else repeats + 1
        if repeats == _MOST_REPEATS:
            raise ConfigError(f"{count} tasks requested, but hardly more than {len(tasks)} of them differ: use fewer")
    return list(tasks.values())


def hub_tasks(
    convert: Callable[[Task], Task], source: str, *, split: str, subset: str | None = None, limit: int = 0
) -> list[Task]:
    """Return the first `limit` rows of a hub dataset, or all for 0, each converted to a task.

    Raises:
        ConfigError: if the dataset cannot be loaded, or if a row is not what `convert` expects.
        MissingDependencyError: without `datasets`.
    """
    if limit < 0:
        raise ConfigError(f"{split}={limit}: use the largest number of rows to take, or 0 for all")
    tasks = []
    for index, row in enumerate(read_hub(source, split=split, subset=subset, limit=limit)):
        where = f"row {index} of {source} ({split})"
        try:
            tasks.append(convert(row))
        except KeyError as error:
            fields = ", ".join(row)
            raise ConfigError(f"{where} has no field {error}, only {fields}: has the dataset changed?") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    return tasks


PREPARE: dict[str, Callable[..., Sequence[Dataset]]] = {
    "arithmetic": prepare_arithmetic,
    "countdown": prepare_countdown,
    "grid_world": prepare_grid_world,
    "gsm8k": prepare_gsm8k,
    "hendrycks_math": prepare_math,
    "hotpotqa": prepare_hotpotqa,
    "math500": prepare_math,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare one dataset. Each parameter of its function is an option.

    A `ConfigError` is printed and ends the program with exit code 2, any other `RLLMError` with 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rllm.data.prepare",
        description="Register a known dataset in $RLLM_HOME/datasets, by default ~/.rllm/datasets.",
    )
    commands = parser.add_subparsers(dest="dataset", required=True)
    for name, prepare in PREPARE.items():
        described = inspect.getdoc(prepare) or ""
        command = commands.add_parser(name, help=described.partition("\n")[0], description=described)
        for parameter in inspect.signature(prepare).parameters.values():
            option, default = f"--{parameter.name.replace('_', '-')}", parameter.default
            if isinstance(default, bool):
                command.add_argument(option, default=default, action=argparse.BooleanOptionalAction)
            else:
                command.add_argument(option, default=default, type=type(default), help="default: %(default)s")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rllm").setLevel(logging.INFO)
    options = vars(parser.parse_args(arguments))
    try:
        for dataset in PREPARE[options.pop("dataset")](**options):
            logger.info("%s, split %s: %s rows in %s", dataset.name, dataset.split, len(dataset), dataset.stored_at)
    except RLLMError as error:
        parser.exit(2 if isinstance(error, ConfigError) else 1, f"{error}\n")


if __name__ == "__main__":
    main()
