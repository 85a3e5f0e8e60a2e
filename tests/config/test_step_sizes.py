from __future__ import annotations

import pytest

from rllm.config.step_sizes import check_sizes, fitted_to_tasks, sizes_in_words
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config


def in_words(config: TrainConfig, num_tasks: int) -> list[str]:
    return sizes_in_words(config, num_tasks, needs_greedy=False)


SIZES = ("tasks_per_step=32", "rollout.group_size=8")


def test_sizes_in_words() -> None:
    config = load_config([*SIZES, "optim.num_minibatches=2", "optim.num_epochs=2"])
    assert in_words(config, 1600) == [
        "32 tasks x 8 rollouts = 256 episodes a step, 4 updates of 128 episodes",
        "100 steps x 32 tasks = 2 times through the 1600 tasks",
    ]
    assert in_words(load_config(["num_steps=1000", "tasks_per_step=2"]), 2)[1].endswith(
        "= 1,000 times through the 2 tasks"
    )
    assert in_words(load_config(SIZES), 1600)[0] == "32 tasks x 8 rollouts = 256 episodes a step, 1 update"
    assert in_words(load_config(["tasks_per_step=1", "rollout.group_size=1", "num_steps=3"]), 1) == [
        "1 task x 1 rollout = 1 episode a step, 1 update",
        "3 steps x 1 task = 3 times through the 1 task",
    ]


def test_greedy_rollouts_are_counted() -> None:
    assert sizes_in_words(load_config(SIZES), 1600, needs_greedy=True)[:2] == [
        "32 tasks x 8 rollouts = 256 episodes a step, 1 update",
        "and 32 greedy rollouts to compare with, one for each task",
    ]


def test_singular_forms() -> None:
    single = ["tasks_per_step=2", "rollout.group_size=1", "num_steps=1", "rollout.resample_rounds=1"]
    assert in_words(load_config([*single, "optim.num_minibatches=2"]), 1) == [
        "2 tasks x 1 rollout = 2 episodes a step, 2 updates of 1 episode",
        "1 step x 2 tasks = 2 times through the 1 task",
        "tasks_per_step=2 exceeds the 1 task of the data set: a step repeats tasks, each time as a separate group",
        "tasks whose rollouts all earn the same are replaced, at most once a step",
    ]
    assert in_words(load_config([*single, "tasks_per_step=4"]), 4)[1] == "1 step x 4 tasks = once through the 4 tasks"
    with pytest.raises(ConfigError, match=r"does not divide the 1 episode of a step, .*: use 1"):
        check_sizes(load_config(["tasks_per_step=1", "rollout.group_size=1", "optim.num_minibatches=2"]), 5)


def test_repeated_tasks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config([*SIZES, "optim.num_minibatches=4", "rollout.resample_rounds=2", "num_steps=1"])
    assert in_words(config, 20) == [
        "32 tasks x 8 rollouts = 256 episodes a step, 4 updates of 64 episodes",
        "1 step x 32 tasks = 1.6 times through the 20 tasks",
        "tasks_per_step=32 exceeds the 20 tasks of the data set: a step repeats tasks, each time as a separate group",
        "tasks whose rollouts all earn the same are replaced, at most 2 times a step",
    ]
    check_sizes(config, 20)
    assert [record.getMessage() for record in caplog.records] == [in_words(config, 20)[2]]


@pytest.mark.parametrize(("asked", "num_tasks", "taken"), [([], 2, 2), ([], 40, 16), (["tasks_per_step=16"], 2, 16)])
def test_tasks_per_step_is_bounded_unless_set(asked: list[str], num_tasks: int, taken: int) -> None:
    config = load_config(load_config(asked))  # as a trainer does with a finished configuration
    assert fitted_to_tasks(config, num_tasks).tasks_per_step == taken


@pytest.mark.parametrize(("parts", "remedy"), [(9, "8"), (3, "2 or 4"), (7, "4 or 8")])
def test_indivisible_minibatches_are_refused(parts: int, remedy: str) -> None:
    sizes = ["tasks_per_step=2", "rollout.group_size=4"]
    check_sizes(load_config([*sizes, "optim.num_minibatches=8"]), 5)
    with pytest.raises(ConfigError) as refused:
        check_sizes(load_config([*sizes, f"optim.num_minibatches={parts}"]), 5)
    assert str(refused.value) == (
        f"optim.num_minibatches={parts} does not divide the 8 episodes of a step, tasks_per_step=2 x rollout.group_size=4: use {remedy}"
    )


def test_critic_warmup_in_words(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["algorithm.name=ppo", "tasks_per_step=2", "num_steps=8", "critic.warmup_steps=7"])
    assert in_words(config, 2)[-1] == "in the first 7 steps only the critic is updated"
    check_sizes(config, 2)
    assert not caplog.records
    config.critic.warmup_steps = 8
    told = "critic.warmup_steps=8 and num_steps=8: only the critic is updated, the policy never"
    assert in_words(config, 2)[-1] == told
    check_sizes(config, 2)
    assert [record.getMessage() for record in caplog.records] == [told]


def test_an_endless_warmup_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    sizes = ["tasks_per_step=2", "num_steps=3", "optim.num_epochs=2"]
    check_sizes(load_config([*sizes, "optim.warmup_steps=6"]), 2)
    assert not caplog.records
    check_sizes(load_config([*sizes, "optim.warmup_steps=7"]), 2)
    told = "optim.warmup_steps=7 is more than the 6 updates of the run: the learning rate never reaches optim.lr"
    assert [record.getMessage() for record in caplog.records] == [told]
