"""Known datasets, generated or from the Hugging Face hub: `python -m rllm.data.prepare countdown --train 500`.

Each `prepare_...` function registers the splits of one dataset and returns them. Every benchmark is one.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from rllm.data.benchmark_rows import arithmetic_task, countdown_task, distinct_tasks
from rllm.data.benchmarks import BENCHMARKS, read_benchmark
from rllm.data.dataset import Dataset, DatasetRegistry
from rllm.errors import ConfigError, RLLMError
from rllm.types import Task

logger = logging.getLogger("rllm.data.prepare")  # as a program, `__name__` is `__main__`


def prepare_benchmark(name: str, *, train: int = 0, test: int = 0) -> list[Dataset]:
    """Register a benchmark of the Hugging Face hub: at most so many rows of each split that it has, or all for 0."""
    benchmark, limits = BENCHMARKS[name], {"train": train, "test": test}
    return [
        DatasetRegistry.register_dataset(
            name, read_benchmark(name, split, limit=limits[split]), split=split, source=benchmark.hub_id
        )
        for split in benchmark.splits
    ]


def prepare_arithmetic(
    *, train: int = 1000, test: int = 100, seed: int = 0, digits: int = 2, operators: int = 2
) -> list[Dataset]:
    """Register `arithmetic`: numbers have up to `digits` digits, and questions up to `operators` of + - and *."""
    for name, value in (("digits", digits), ("operators", operators)):
        if value < 1:
            raise ConfigError(f"{name}={value}: use at least 1")
    make = partial(arithmetic_task, digits=digits, operators=operators)
    return register_random("arithmetic", make, train=train, test=test, seed=seed)


def prepare_countdown(*, train: int = 1000, test: int = 100, seed: int = 0) -> list[Dataset]:
    """Register `countdown`: reach a target by arithmetic with three or four numbers. Each task can be solved."""
    return register_random("countdown", countdown_task, train=train, test=test, seed=seed)


def prepare_grid_world(
    *, train: int = 1000, test: int = 100, seed: int = 0, size: int = 4, p: float = 0.8, is_slippery: bool = False
) -> list[Dataset]:
    """Register `grid_world`: squares of `size` cells a side, each of which is ice with probability `p`.

    A task has the seed of its map. The environment draws maps from it until one has a way to the goal.
    """
    if not 2 <= size <= 64:
        raise ConfigError(f"size={size}: use 2 to 64")
    if not 0 <= p <= 1:
        raise ConfigError(f"p={p}: use a probability from 0 to 1")
    # On slippery ice one move in three goes where it was meant to.
    max_steps = (12 if is_slippery else 4) * size

    def grid_world_task(rng: random.Random) -> Task:
        return {"seed": rng.randrange(2**31), "size": size, "p": p, "is_slippery": is_slippery, "max_steps": max_steps}

    return register_random("grid_world", grid_world_task, train=train, test=test, seed=seed)


def register_random(
    name: str, make: Callable[[random.Random], Task], *, train: int, test: int, seed: int
) -> list[Dataset]:
    """Register so many distinct train and test tasks. The test tasks depend on `test` and `seed` alone."""
    for split, count in (("train", train), ("test", test)):
        if count < 1:
            raise ConfigError(f"{split}={count}: use at least 1 task")
    tasks = distinct_tasks(lambda rng, _: make(rng), test + train, seed=seed)
    splits: tuple[tuple[Literal["train", "test"], list[Task]], ...] = (("train", tasks[test:]), ("test", tasks[:test]))
    return [DatasetRegistry.register_dataset(name, rows, split=split, seed=seed) for split, rows in splits]


PREPARE: dict[str, Callable[..., Sequence[Dataset]]] = {
    "arithmetic": prepare_arithmetic,
    "countdown": prepare_countdown,
    "grid_world": prepare_grid_world,
    **{name: partial(prepare_benchmark, name) for name, item in BENCHMARKS.items() if item.hub_id is not None},
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
        described = BENCHMARKS[name].about if isinstance(prepare, partial) else inspect.getdoc(prepare) or ""
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
