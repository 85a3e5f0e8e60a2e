"""`python -m rllm.data.prepare_hotpotqa`: questions over several documents (https://arxiv.org/abs/1809.09600)."""

from __future__ import annotations

from rllm.data.dataset import Dataset
from rllm.data.prepare import hub_tasks, run
from rllm.data.registry import DatasetRegistry
from rllm.types import Task

HUB_ID = "hotpotqa/hotpot_qa"


def prepare(*, train: int = 10_000, test: int = 1_000) -> list[Dataset]:
    """Register `hotpotqa` from the Hugging Face hub: at most so many rows of each split, or all for 0.

    Each question has ten documents, of which two hold the answer. The test split is the hub's validation split: the
    hub's own test split has no answers. All of it is about half a gigabyte.
    """
    splits = (("train", "train", train), ("test", "validation", test))
    return [
        DatasetRegistry.register_dataset(
            "hotpotqa",
            hub_tasks(hotpotqa_task, HUB_ID, subset="distractor", split=hub_split, limit=limit),
            split=split,
            source=HUB_ID,
        )
        for split, hub_split, limit in splits
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


if __name__ == "__main__":
    run(prepare)
