"""`reasoning-gym:FAMILY`: generated tasks of the package reasoning-gym, scored by its own rules."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Self

from rllm.data.dataset import Dataset
from rllm.environments.base.base_env import BaseEnv, unwrapped
from rllm.environments.named import NamedEnvironment, refuse_unknown, take_whole_number, values_of
from rllm.errors import ConfigError, EnvError, RewardError, boundary
from rllm.registry import did_you_mean
from rllm.types import JSONMapping, JSONObject

FORMATS = {
    "tags": "\n\nThink first if you need to, then give your final answer between <answer> and </answer>.",
    "text": "\n\nAnswer with the final answer only.",
    "number": "\n\nEnd with the final answer, a number.",
}
"""Formats of answers, and their part of the prompt: the last tags, the whole text, or the last number in the text."""
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def families() -> list[str]:
    """Return the names of all families of tasks."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the tasks of a family.

    Args:
        name: a family, such as `leg_counting`.
        params: `size` (500) and `seed` (0) of the tasks, of which task i is generated from `seed` + i; `level` of the
            family's curriculum, from 0, which sets its difficulty; `format` of the answer (see `FORMATS`); and the
            settings of the family's dataset, such as `max_animals=5`, as JSON or text.

    Raises:
        ConfigError: if the family or a parameter is unknown, or a value is refused.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        meant = did_you_mean(name, DATASETS) or "see `rllm list envs reasoning-gym`"
        raise ConfigError(f"reasoning-gym has no family {name!r}; {meant}")
    own = dict(params)
    size, seed = take_whole_number(own, "size", 500, least=1), take_whole_number(own, "seed", 0)
    level = take_whole_number(own, "level", 0) if "level" in own else None
    answer_format = own.pop("format", "tags")
    if answer_format not in FORMATS:
        raise ConfigError(f"format={answer_format}: use one of {', '.join(FORMATS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])}
    refuse_unknown(own, known | {"format", "level"})
    settings = {"size": size, "seed": seed, **_of_level(name, level), **values_of(own)}
    text = json.dumps(settings, sort_keys=True)
    tasks = _dataset(name, text)
    rows = [
        {
            "id": f"{name}/{seed}/{index}",
            "question": tasks[index]["question"] + FORMATS[answer_format],
            "family": name,
            "format": answer_format,
            "generated_by": {"settings": text, "index": index},
        }
        for index in range(size)
    ]
    return NamedEnvironment(tasks=Dataset.of_tasks(rows, name=name), env_class=ReasoningGymEnv)


def _of_level(name: str, level: int | None) -> JSONObject:
    """Return the settings of a level of the family's curriculum."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    if level is None:
        return {}
    if name not in CURRICULA:
        raise ConfigError(f"level={level}: {name} has no curriculum; set its own settings instead")
    curriculum: Any = CURRICULA[name]()
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > highest:  # the package would use the highest instead
        raise ConfigError(f"level={level}: the levels of {name} are 0 to {highest}")
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    fresh = DATASETS[name][1]()
    names = [field.name for field in dataclasses.fields(config)]
    chosen = {key: getattr(config, key) for key in names if getattr(config, key) != getattr(fresh, key)}
    return {key: value for key, value in chosen.items() if key not in ("size", "seed")}


@lru_cache(maxsize=64)
def _dataset(name: str, settings: str) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **json.loads(settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} refuses its settings {settings}: {error}") from error


class ReasoningGymEnv(BaseEnv):
    """One task; the reward of its answer comes from `score_answer`, from 0 to 1."""

    def __init__(self, question: str, family: str, format: str, generated_by: JSONMapping) -> None:
        self.question = question
        self.format = format
        with boundary(EnvError, f"reasoning-gym {family}"):
            self._tasks = _dataset(family, generated_by["settings"])
            self._entry = self._tasks[generated_by["index"]]
        self._name = f"score_answer of {family}"

    @classmethod
    def from_dict(cls, info: JSONMapping) -> Self:
        """Return the environment of a row of `open_env`."""
        return cls(**{key: info[key] for key in ("question", "family", "format", "generated_by")})

    @classmethod
    def argument_names(cls) -> Collection[str]:
        """Return no names: a row holds everything."""
        return ()

    def reset(self) -> tuple[str, JSONObject]:
        """Return the question."""
        return self.question, {}

    def step(self, action: Any) -> tuple[str, float, bool, JSONObject]:
        """Score the answer in the model's text.

        Raises:
            RewardError: if the package raises.
        """
        answer = answer_in(str(unwrapped(action)), self.format)
        with boundary(RewardError, self._name):
            reward = float(self._tasks.score_answer(answer, self._entry))
        return "", reward, True, {"answer": answer, "expected": str(self._entry["answer"]), "is_correct": reward >= 1.0}


def answer_in(text: str, format: str) -> str | None:
    """Return the answer in the model's text, `None` if it has none in this format."""
    if format == "text":
        return text.strip()
    found = _TAGS.findall(text) if format == "tags" else _NUMBER.findall(text)
    if not found:
        return None
    return str(found[-1]).strip() if format == "tags" else str(found[-1]).replace(",", "")
