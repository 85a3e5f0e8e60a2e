"""`python -m rllm.data.prepare_gsm8k`: grade-school word problems (https://arxiv.org/abs/2110.14168)."""

from __future__ import annotations

from rllm.data.dataset import Dataset
from rllm.data.prepare import hub_tasks, run
from rllm.data.registry import DatasetRegistry
from rllm.types import Task

HUB_ID = "openai/gsm8k"


def prepare(*, train: int = 0, test: int = 0) -> list[Dataset]:
    """Register `gsm8k` from the Hugging Face hub: at most so many rows of each split, or all for 0."""
    return [
        DatasetRegistry.register_dataset(
            "gsm8k", hub_tasks(gsm8k_task, HUB_ID, subset="main", split=split, limit=limit), split=split, source=HUB_ID
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


if __name__ == "__main__":
    run(prepare)
