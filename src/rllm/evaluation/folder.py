"""Folders of evaluations, used by one process at a time, and the comparison of two, paired by task.

Two models tend to solve the same easy tasks, so the difference on each task varies less than either accuracy does.
The difference in accuracy has the interval of Agresti & Min (2005) for matched proportions: Wald's interval
after half a task has been added to each of the four outcomes of a pair. Rewards have Student's interval of the mean
difference.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from rllm._runtime.files import replace_text
from rllm._runtime.untrusted import read_json
from rllm.data.dataset import Dataset
from rllm.engine.episode_log import EPISODES
from rllm.errors import ConfigError, counted
from rllm.evaluation.report import Z_95, Report, t_quantile
from rllm.store.codec import readable_json
from rllm.tracking.about import EVALUATION, check_contained, in_use, seal
from rllm.types import JSONMapping, JSONObject

_OF_RUNS = ("config.yaml", "traces.db")
"""Files of a training run or a gateway."""
_ADDRESS = re.compile(rb"0x[0-9a-f]+")


@dataclass(frozen=True)
class EvaluationFolder:
    """Paths of an evaluation's files."""

    path: Path

    @property
    def episodes(self) -> Path:
        return self.path / EPISODES

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def identity(self) -> Path:
        return self.path / EVALUATION

    @contextmanager
    def claimed(self, identity: Mapping[str, str]) -> Iterator[None]:
        """Hold the folder exclusively for the evaluation of this identity; create it if needed.

        Raises:
            ConfigError: if another process holds it, or it has another evaluation, naming the differences.
        """
        check_contained(self.path)  # since links in it would be followed
        with in_use(self.path, "out"):
            self._check(identity)
            yield

    def write_report(self, report: Report) -> None:
        """Replace the report atomically."""
        _replace(self.report, report.to_dict())

    def _check(self, identity: Mapping[str, str]) -> None:
        if not self.identity.exists() and not self.episodes.exists():
            if others := [name for name in _OF_RUNS if (self.path / name).exists()]:
                raise ConfigError(f"out={str(self.path)!r} has a {others[0]} of another program: name another folder")
            _replace(self.identity, identity)
            seal(self.path)
            return
        try:
            before = dict(read_json(self.identity))
            names = dict.fromkeys([*before, *identity])
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"out={str(self.path)!r} does not record what was evaluated ({self.identity.name}: {error}): "
                "name another folder"
            ) from error
        changes = [
            f"{name} was {before.get(name, 'not set')}, and is now {identity.get(name, 'not set')}"
            for name in names
            if before.get(name) != identity.get(name)
        ]
        if changes:
            raise ConfigError(
                f"out={str(self.path)!r} holds another evaluation: {'; '.join(changes)}. Name another folder, "
                "or continue with what was evaluated there"
            )


def dataset_identity(dataset: Dataset) -> str:
    """Return a description of a dataset's content: number of tasks and digest."""
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(_ADDRESS.sub(b"", readable_json(row, sort_keys=True)) + b"\n")
    return f"{counted(len(dataset), 'task')} (sha256 {digest.hexdigest()[:16]})"


def file_identity(path: Path) -> str:
    """Return the digest of a file's content."""
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _replace(path: Path, data: JSONMapping) -> None:
    replace_text(path, json.dumps(data, indent=2) + "\n")


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

    def to_dict(self) -> JSONObject:
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
        empty = [str(path) for path, found in ((first, before), (second, after)) if not found.accuracy]
        why = f"no rollout of {empty[0]} was scored" if empty else "the two evaluations have no scored task in common"
        raise ConfigError(f"--compare {first} {second}: {why}; evaluate both on the same data")
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
            report = read_json(folder.report)
            tasks = [] if report["accuracy"] is None else report["tasks"]
            identity = {str(name): str(value) for name, value in read_json(folder.identity).items()}
            accuracy = {task["task_id"]: float(task["accuracy"]) for task in tasks if task["accuracy"] is not None}
            reward = {task["task_id"]: float(task["mean_reward"]) for task in tasks if task["mean_reward"] is not None}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = "its report.json is missing or damaged" if path.is_dir() else "it does not exist"
            raise ConfigError(
                f"--compare {path}: not the folder of a finished evaluation, since {problem}; "
                "name what `rllm eval --out FOLDER` wrote"
            ) from error
        return cls(accuracy=accuracy, reward=reward, identity=identity)
