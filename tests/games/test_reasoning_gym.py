"""`reasoning-gym:FAMILY` with the real package."""

import re
from collections import Counter

import pytest

from rllm.demo.tasks import sum_tasks
from rllm.environments import open_env
from rllm.environments.named import names_of
from rllm.environments.reasoning_gym_env import FORMATS
from rllm.errors import ConfigError

pytestmark = pytest.mark.games


def opened(spec):
    named = open_env(f"reasoning-gym:{spec}")
    return named, [named.env_class.from_dict({**row, **named.env_args}) for row in named.tasks]


def test_task_follows_from_the_seed_plus_its_number():
    first, again, next_seed, apart = (
        list(open_env(f"reasoning-gym:leg_counting?size=3&seed={seed}").tasks) for seed in (1, 1, 2, 4)
    )
    assert first == again
    assert [row["id"] for row in first] == ["leg_counting/1/0", "leg_counting/1/1", "leg_counting/1/2"]
    assert [row["question"] for row in first[1:]] == [row["question"] for row in next_seed[:2]]
    assert not {row["question"] for row in first} & {row["question"] for row in apart}


def test_answer_in_the_stated_format_is_scored_by_the_package():
    _, [env] = opened("chain_sum?size=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1")
    question, _ = env.reset()
    assert "between <answer> and </answer>" in question
    first, sign, second = re.findall(r"(\d+) ([+-]) (\d+)", question)[-1]
    result = int(first) + int(second) * (1 if sign == "+" else -1)
    _, reward, done, info = env.step(f"First <answer>0</answer>, no: <answer>{result}</answer>")
    assert (reward, done, info["is_correct"]) == (1.0, True, True)
    assert env.step(f"<answer>{result + 1}</answer>")[1] < 1.0
    assert env.step(str(result))[3]["answer"] is None, "without tags there is no answer"


def test_sums_of_the_demo_are_those_of_the_package():
    """`rllm demo --model` makes its own, so that it needs no package."""
    named, _ = opened("chain_sum?size=400&min_terms=2&max_terms=3&min_digits=1&max_digits=2&format=number")
    suffix = FORMATS["number"]
    theirs = Counter(re.sub(r"\d", "0", row["question"].removesuffix(suffix)) for row in named.tasks)
    ours = Counter(re.sub(r"\d", "0", task["question"]) for task in sum_tasks(400, seed=0))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 12
    assert max(abs(ours[shape] - count) for shape, count in theirs.items()) < 40


def test_higher_curriculum_levels_make_tasks_harder():
    longest = [
        max(len(row["question"]) for row in open_env(f"reasoning-gym:chain_sum?size=20&level={level}").tasks)
        for level in (0, 3)
    ]
    assert longest[0] < longest[1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("leg_countin", "did you mean 'leg_counting'"),
        ("leg_counting?max_animal=3", "did you mean 'max_animals'"),
        ("leg_counting?min_animals=9&max_animals=3", "refuses its settings"),
        ("leg_counting?format=xml", "format=xml"),
        ("leg_counting?level=36", "the levels of leg_counting are 0 to 35"),
    ],
)
def test_invalid_input_is_rejected(spec, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_env(f"reasoning-gym:{spec}")


def test_rows_of_one_task_from_two_seeds_differ_only_in_their_origin():
    first, second = (open_env(f"reasoning-gym:leg_counting?size=2&seed={seed}").tasks for seed in (0, 1))
    assert {key for key in first[1] if first[1][key] != second[0][key]} == {"id", "generated_by"}


def test_more_than_a_hundred_families_are_listed():
    assert len(names_of("reasoning-gym")) > 100
