"""Common parts of the `prepare_...` programs: options, distinct random tasks, and rows of the Hugging Face hub."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from rllm.data.dataset import Dataset
from rllm.data.registry import DatasetRegistry
from rllm.data.sources import read_hub
from rllm.errors import ConfigError, RLLMError
from rllm.types import Task

logger = logging.getLogger(__name__)

_MOST_REPEATS = 1000
"""Draws without a new task after which there are hardly any left."""


def run(prepare: Callable[..., Sequence[Dataset]], arguments: Sequence[str] | None = None) -> None:
    """Call `prepare` as a program with an option for each of its parameters, all of which have defaults.

    A `ConfigError` is printed and ends the program with exit code 2, any other `RLLMError` with 1.
    """
    parser = argparse.ArgumentParser(description=inspect.getdoc(prepare))
    for name, parameter in inspect.signature(prepare).parameters.items():
        is_flag = isinstance(parameter.default, bool)
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if is_flag else {"type": type(parameter.default)}
        )
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, default=parameter.default, help="default: %(default)s", **kind)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rllm").setLevel(logging.INFO)
    try:
        for dataset in prepare(**vars(parser.parse_args(arguments))):
            logger.info("%s, split %s: %s rows in %s", dataset.name, dataset.split, len(dataset), dataset.stored_at)
    except RLLMError as error:
        parser.exit(2 if isinstance(error, ConfigError) else 1, f"{error}\n")


def register_random(
    name: str, make: Callable[[random.Random], Task], *, train: int, test: int, seed: int
) -> list[Dataset]:
    """Register so many distinct train and test tasks. The test tasks depend on `test` and `seed` alone."""
    for split, count in (("train", train), ("test", test)):
        if count < 1:
            raise ConfigError(f"{split}={count}: use at least 1 task")
    tasks = distinct_tasks(make, test + train, seed=seed)
    return [
        DatasetRegistry.register_dataset(name, tasks[test:], split="train", seed=seed),
        DatasetRegistry.register_dataset(name, tasks[:test], split="test", seed=seed),
    ]


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
    rows = read_hub(source, split=split, subset=subset, limit=limit)
    return [converted(convert, row, f"row {index} of {source} ({split})") for index, row in enumerate(rows)]


def converted(convert: Callable[[Task], Task], row: Task, where: str) -> Task:
    """Return the task of a row.

    Raises:
        ConfigError: naming the row, and the field that is missing or wrong.
    """
    try:
        return convert(row)
    except KeyError as error:
        raise ConfigError(f"{where} has no field {error}: it has {', '.join(row)}; has the dataset changed?") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
