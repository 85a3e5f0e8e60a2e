"""`python -m rllm.data.prepare_math`: competition mathematics to train on, and MATH-500 to test with.

The problems are those of https://arxiv.org/abs/2103.03874, the choice of 500 that of https://arxiv.org/abs/2305.20050.
"""

from __future__ import annotations

import random
import re

from rllm.data.dataset import Dataset
from rllm.data.prepare import hub_tasks, run
from rllm.data.registry import DatasetRegistry
from rllm.types import Task

TRAIN_HUB_ID = "EleutherAI/hendrycks_math"
TEST_HUB_ID = "HuggingFaceH4/MATH-500"
SUBJECTS = (
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


def prepare(*, train: int = 0, test: int = 0) -> list[Dataset]:
    """Register `hendrycks_math` (split train) and `math500` (split test) from the Hugging Face hub.

    At most so many rows of each, or all for 0. The subjects of the training problems are mixed.
    """
    problems = [task for subject in SUBJECTS for task in _problems_of(subject, train)]
    random.Random(0).shuffle(problems)
    held_out = hub_tasks(math500_task, TEST_HUB_ID, split="test", limit=test)
    return [
        DatasetRegistry.register_dataset(
            "hendrycks_math", problems[: train or None], split="train", source=TRAIN_HUB_ID
        ),
        DatasetRegistry.register_dataset("math500", held_out, split="test", source=TEST_HUB_ID),
    ]


def _problems_of(subject: str, limit: int) -> list[Task]:
    return hub_tasks(hendrycks_task, TRAIN_HUB_ID, subset=subject, split="train", limit=limit)


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
    raise ValueError(f"\\boxed{rest[:80]!r} does not end")


if __name__ == "__main__":
    run(prepare)
