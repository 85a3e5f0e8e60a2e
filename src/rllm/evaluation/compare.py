"""Comparison of two evaluations of the same tasks, paired by task.

Two models tend to solve the same easy tasks, so the difference on each task varies less than either accuracy does.
The interval of the difference in accuracy is that of Agresti & Min (2005) for matched proportions: Wald's interval
after half a task has been added to each of the four outcomes of a pair. Rewards have Student's interval of the mean
difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rllm._runtime.untrusted import read_json
from rllm.errors import ConfigError
from rllm.evaluation.folder import EvaluationFolder
from rllm.evaluation.pass_at_k import Z_95, t_quantile
from rllm.tracking.own_runs import check_contained


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The second evaluation's mean minus the first one's, with a 95 % confidence interval."""

    first: float
    second: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two evaluations, over the tasks that both have scored."""

    num_tasks: int
    num_better: int
    """Tasks with a higher accuracy in the second evaluation."""
    num_worse: int
    num_unpaired: int
    """Tasks that only one of the two has scored; they are left out."""
    accuracy: Difference
    mean_reward: Difference | None
    """`None` for fewer than two tasks with a reward in both."""
    changes: dict[str, tuple[str, str]]
    """Settings that differ between the evaluations, such as the model: name to both values."""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return asdict(self)


def compare(first: str | Path, second: str | Path) -> Comparison:
    """Compare two folders of `rllm eval`.

    Raises:
        ConfigError: if a folder holds no finished evaluation, or the two have no task in common.
    """
    before, after = _Evaluated.read(Path(first)), _Evaluated.read(Path(second))
    shared = [task for task in before.accuracy if task in after.accuracy]
    if not shared:
        raise ConfigError(
            f"--compare {first} {second}: the two evaluations have no scored task in common; "
            "evaluate both on the same data"
        )
    pairs = [(before.accuracy[task], after.accuracy[task]) for task in shared]
    rewards = [(before.reward[task], after.reward[task]) for task in before.reward if task in after.reward]
    names = dict.fromkeys([*before.identity, *after.identity])
    identities = {name: (before.identity.get(name, ""), after.identity.get(name, "")) for name in names}
    return Comparison(
        num_tasks=len(shared),
        num_better=sum(one < two for one, two in pairs),
        num_worse=sum(one > two for one, two in pairs),
        num_unpaired=len(before.accuracy.keys() ^ after.accuracy.keys()),
        accuracy=difference_of_rates(pairs),
        mean_reward=difference_of_means(rewards) if len(rewards) > 1 else None,
        changes={name: values for name, values in identities.items() if values[0] != values[1]},
    )


def difference_of_rates(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Return the mean difference of paired rates between 0 and 1, with the interval of Agresti & Min."""
    size = len(pairs) + 2
    differences = [two - one for one, two in pairs]
    centre = math.fsum(differences) / size
    variance = (math.fsum(value**2 for value in differences) + 1) / size - centre**2
    return _difference(pairs, centre, Z_95 * math.sqrt(variance / size), bounds=(-1.0, 1.0))


def difference_of_means(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Return the mean difference of at least two pairs, with Student's interval."""
    differences = [two - one for one, two in pairs]
    half = t_quantile(len(pairs) - 1) * stdev(differences) / math.sqrt(len(pairs))
    return _difference(pairs, fmean(differences), half, bounds=(-math.inf, math.inf))


def _difference(
    pairs: Sequence[tuple[float, float]], centre: float, half: float, *, bounds: tuple[float, float]
) -> Difference:
    first, second = (fmean(values) for values in zip(*pairs, strict=True))
    return Difference(
        first=first,
        second=second,
        value=second - first,
        low=max(bounds[0], centre - half),
        high=min(bounds[1], centre + half),
    )


@dataclass(frozen=True, kw_only=True)
class _Evaluated:
    """Accuracy and mean reward of each task of one evaluation, and its identity."""

    accuracy: Mapping[str, float]
    reward: Mapping[str, float]
    identity: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> _Evaluated:
        folder = EvaluationFolder(path)
        try:
            check_contained(path)
            tasks = read_json(folder.report)["tasks"]
            identity = {str(name): str(value) for name, value in read_json(folder.identity).items()}
            accuracy = {task["task_id"]: float(task["accuracy"]) for task in tasks if task["accuracy"] is not None}
            reward = {task["task_id"]: float(task["mean_reward"]) for task in tasks if task["mean_reward"] is not None}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = "it has no report.json that can be read" if path.is_dir() else "there is no such folder"
            raise ConfigError(
                f"--compare {path}: not the folder of a finished evaluation, since {problem}; "
                "name what `rllm eval --out FOLDER` wrote"
            ) from error
        return cls(accuracy=accuracy, reward=reward, identity=identity)
