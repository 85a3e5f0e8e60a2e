from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from rllm.algorithms.base import Algorithm
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.rae import RAE
from rllm.algorithms.reinforce import ReMax
from rllm.config.schema import FilterConfig, RoleConfig
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.credit import DROPPED_KEY, assemble
from rllm.trainer.rollouts import eval_attempts, training_attempts
from rllm.trainer.selection import drop_filtered, drop_uniform, num_informative
from rllm.trainer.settings import check_fit
from rllm.types import REFERENCE_KEY, Episode, Step, TerminationReason, Trace, Trajectory, TrajectoryGroup

from .conftest import RunTrainer, ask


def episode_of(
    reward: float | None,
    *,
    task: str = "t",
    ended: TerminationReason = TerminationReason.ENV_DONE,
    finish: str = "stop",
    name: str = "agent",
    **fields: Any,
) -> Episode:
    step = Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0], finish_reason=finish)
    path = Trajectory(name=name, reward=reward, steps=[step], **fields)
    return Episode(task_id=task, trajectories=[path], termination_reason=ended)


def greedy() -> dict[str, Any]:
    """Return the info of a trajectory of a greedy attempt."""
    return {"trainable": False, "info": {REFERENCE_KEY: True}}


def reasons(episodes: list[Episode]) -> list[str | None]:
    return [path.info.get("left_out") for episode in episodes for path in episode.trajectories]


def test_rollouts_are_filtered_by_termination_reason() -> None:
    episodes = [
        episode_of(1.0),
        episode_of(0.0, ended=TerminationReason.MAX_TURNS_EXCEEDED),
        episode_of(0.0, finish="length"),
    ]
    drop_filtered(episodes, FilterConfig())
    assert reasons(episodes) == [None, None, None]
    drop_filtered(episodes, FilterConfig(ended_by=["max_turns_exceeded"], truncated=True))
    assert reasons(episodes) == [None, "max_turns_exceeded", "truncated"]


def test_rollouts_with_images_are_left_out() -> None:
    look = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {}}]}]
    trace = Trace(id="c", call_id="c", session_id="s", model="m", messages=look, response={}, response_ids=[2])
    text_step = Step(id="c", chat_completions=[{"role": "user", "content": "?"}])
    text_step.fill_from(trace)
    episodes = [Episode(trajectories=[Trajectory(steps=[step])]) for step in (Step.from_trace(trace), text_step)]
    drop_filtered(episodes, FilterConfig())
    assert reasons(episodes) == ["not_text", "not_text"]


def test_task_is_informative_if_rewards_of_any_role_differ() -> None:
    alike = [episode_of(1.0, task="alike"), episode_of(1.0, task="alike"), episode_of(None, task="alike")]
    different = [episode_of(1.0, task="different"), episode_of(0.0, task="different")]
    roles = [episode_of(1.0, task="roles"), episode_of(1.0, task="roles")]
    roles += [episode_of(0.0, task="roles", name="judge"), episode_of(1.0, task="roles", name="judge")]
    frozen = [episode_of(1.0, task="frozen"), episode_of(0.0, task="frozen", trainable=False)]
    assert [num_informative(group, GRPO()) for group in (alike, different, roles, frozen)] == [0, 1, 1, 0]
    assert num_informative([*alike, *different, *roles, *frozen], GRPO()) == 2
    assert num_informative(roles, GRPO(), {"judge": RoleConfig(trainable=False)}) == 0
    drop_uniform(episodes := [*alike, *different], GRPO())
    assert reasons(episodes) == ["zero_variance", "zero_variance", None, None, None]


def test_equal_rewards_are_trained_by_algorithms_without_comparison() -> None:
    episodes = [episode_of(1.0, task="nim"), episode_of(1.0, task="nim")]
    assert [num_informative(episodes, algorithm) for algorithm in (GRPO(), RAE())] == [0, 1]
    assembled = assemble(episodes, RAE(decay=0.5), step=0, temperature=1.0)
    assert (assembled.advantages, assembled.num_uniform_groups) == ([0.5, 0.25], 0)
    drop_uniform(episodes, RAE())
    assert reasons(episodes) == [None, None]


def test_rollouts_without_siblings_are_counted_separately_from_equal_ones() -> None:
    episodes = [episode_of(1.0), episode_of(None)]
    drop_uniform(episodes, GRPO())
    assert reasons(episodes) == ["too_few_siblings", None]
    alike = [episode_of(1.0), episode_of(1.0, **greedy())]
    drop_uniform(alike, ReMax())
    assert reasons(alike) == ["zero_variance", None]


def test_uninformative_tasks_are_replaced(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        ask(base_url, word)
        turns[word] = turns.get(word, 0) + 1
        return float(turns[word] % 2) if word in ("fig", "kiwi") else 1.0

    turns: dict[str, int] = {}
    rollout = {"group_size": 2, "max_concurrent": 1}
    run = run_trainer({"num_steps": 1, "tasks_per_step": 2, "rollout": {**rollout, "resample_rounds": 3}}, agent=agent)
    assert {"fig", "kiwi"} <= set(run.words)
    assert len(run.words) > 2 * 2
    (batch,) = run.backend.batches
    assert len(batch) == 2 * 2, "only the two informative tasks are trained"
    num_replaced = len(run.words) // 2 - 2
    assert run.lines[-1]["batch/zero_variance"] == pytest.approx(num_replaced / (num_replaced + 2))
    assert batch.weights.sum().item() == pytest.approx(1.0), "replaced tasks do not count in the mean"


def test_number_of_resampling_rounds_is_limited(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        ask(base_url, word)
        return 1.0

    rollout = {"group_size": 2, "resample_rounds": 2}
    run = run_trainer({"num_steps": 1, "tasks_per_step": 2, "rollout": rollout}, agent=agent)
    assert len(run.words) == 3 * 2 * 2
    assert run.lines[-1]["dropped/zero_variance"] == 12
    assert (run.lines[-1]["batch/num_groups"], run.lines[-1]["batch/zero_variance"]) == (6, 1.0)
    assert run.lines[-1]["signal/no_variance"] == 1.0


def test_task_that_always_fails_may_replace_others(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        ask(base_url, word)
        begun.append(word)
        if len(begun) > 2 * 2:
            raise ValueError("this task has no answer")
        return float(len(begun) > 2 and len(begun) % 2)

    begun: list[str] = []
    rollout = {"group_size": 2, "max_concurrent": 1, "resample_rounds": 1}
    run = run_trainer({"num_steps": 1, "tasks_per_step": 2, "rollout": rollout}, agent=agent)
    assert len(begun) == 3 * 2, "the first task is uniform, and its replacement fails"
    (batch,) = run.backend.batches
    assert len(batch) == 2
    assert run.lines[-1]["rollout/num_failed"] == 2


def test_filtered_rollouts_do_not_make_a_task_informative(run_trainer: RunTrainer) -> None:
    def agent(word: str, base_url: str) -> float:
        turns[word] = turns.get(word, 0) + 1
        is_cut = turns[word] % 2 == 0
        ask(base_url, word * 50 if is_cut else word)
        return float(is_cut)

    turns: dict[str, int] = {}
    rollout = {"group_size": 2, "max_concurrent": 1, "max_tokens": 40, "resample_rounds": 2}
    config = {"num_steps": 1, "tasks_per_step": 2, "rollout": rollout, "filters": {"truncated": True}}
    run = run_trainer(config, agent=agent)
    assert run.lines[-1]["dropped/truncated"] == 6
    assert len(run.words) == 3 * 2 * 2, "rewards differ only because of truncated answers"


def test_group_may_differ_only_from_its_greedy_rollout() -> None:
    def episodes() -> list[Episode]:
        return [episode_of(1.0), episode_of(1.0), episode_of(0.0, **greedy())]

    def left_out(found: list[Episode]) -> list[bool]:
        return [DROPPED_KEY in episode.trajectories[0].info for episode in found]

    assert (num_informative(episodes(), GRPO()), num_informative(episodes(), ReMax())) == (0, 1)
    assert num_informative(episodes()[2:], ReMax()) == 0
    alone, compared = episodes(), episodes()
    drop_uniform(alone, GRPO())
    drop_uniform(compared, ReMax())
    assert (left_out(alone), left_out(compared)) == ([True, True, False], [False, False, False])


def test_filters_do_not_apply_to_greedy_rollouts() -> None:
    compared = episode_of(0.0, finish="length", **greedy())
    episodes = [episode_of(1.0), episode_of(1.0), compared]
    drop_filtered(episodes, FilterConfig(truncated=True))
    drop_uniform(episodes, ReMax())
    assert reasons(episodes) == [None, None, "truncated"]
    found = assemble(episodes, ReMax(), step=0, temperature=1.0)
    assert [credit.baseline for credit in found.credits] == [0.0, 0.0, None]
    assert num_informative(episodes, ReMax()) == 1


def test_dropped_rollouts_do_not_make_a_task_informative() -> None:
    without_tokens = Episode(task_id="t", trajectories=[Trajectory(reward=1.0)])
    assert num_informative([episode_of(0.0), episode_of(0.0), without_tokens], GRPO()) == 0
    assert num_informative([episode_of(0.0), episode_of(1.0)], ReMax()) == 0, "the greedy rollout failed"


def test_tasks_at_level_step_are_informative_by_their_steps() -> None:
    def episodes(*rewards: tuple[float, ...]) -> list[Episode]:
        steps = [
            [Step(id=f"{row}.{place}", response_ids=[2], reward=reward) for place, reward in enumerate(earned)]
            for row, earned in enumerate(rewards)
        ]
        return [Episode(task_id="t", trajectories=[Trajectory(steps=each)]) for each in steps]

    by_step = GRPO(level="step", gamma=0.5)
    differing, alike = ((1.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (0.0, 1.0), (0.5,))
    assert num_informative(episodes(*differing), GRPO()) == 0, "both trajectories sum to 1"
    assert num_informative(episodes(*differing), by_step) == 1, "returns are 1 and 0.5, then 0 and 1"
    assert num_informative(episodes(*alike), by_step) == 0, "the first returns are all 0.5"
    drop_uniform(found := episodes(*differing), by_step)
    assert reasons(found) == [None, None]
    drop_uniform(found := episodes(*alike, (0.0, 1.0, 0.0)), by_step)
    assert reasons(found) == ["zero_variance"] * 4, "equal rewards take precedence over a step without siblings"
    drop_uniform(found := episodes((0.0, 1.0), (0.25, 0.5), (0.5,)), by_step)
    assert reasons(found) == [None, None, "zero_variance"], "the second steps of the others differ"


@dataclass(frozen=True, kw_only=True)
class AgainstGreedy(Algorithm):
    """Algorithm that compares with the greedy rollout, like ReMax."""

    needs_greedy: ClassVar[bool] = True

    def credit(self, group: TrajectoryGroup) -> list[float]:
        (greedy,) = group.references
        return [reward - (greedy.final_reward() or 0.0) for reward in group.rewards]


def config_of(*settings: str) -> TrainConfig:
    return load_config(["tasks_per_step=2", "rollout.group_size=3", "rollout.temperature=0.5", *settings])


DATA = Dataset([{"word": word} for word in "abcde"])


def test_attempts_follow_from_seed_and_step() -> None:
    made = training_attempts(DATA, [3, 4], config_of(), AgainstGreedy(), step=4)
    assert made[0].sampling.items() >= {"temperature": 0.5, "top_p": 1.0, "top_k": -1}.items()
    assert [(item.index, item.trainable, item.sampling["temperature"]) for item in made] == 2 * [
        (0, True, 0.5),
        (1, True, 0.5),
        (2, True, 0.5),
        (3, False, 0.0),
    ]
    again = training_attempts(DATA, [3, 4], config_of(), AgainstGreedy(), step=4)
    assert [item.task_id for item in made] == [item.task_id for item in again]
    extra = training_attempts(DATA, [0, 1], config_of(), AgainstGreedy(), step=4, extra_round=1)
    assert {item.task["word"] for item in extra}.isdisjoint(item.task["word"] for item in made)
    assert {item.task_id for item in extra}.isdisjoint(item.task_id for item in made)


def test_repeated_held_out_tasks_have_consecutive_indices() -> None:
    made = eval_attempts(DATA.select([0]).repeat(2), config_of("eval.num_rollouts=2"), step=0)
    assert [(item.task_id, item.index) for item in made] == [("0", 0), ("0", 1), ("0", 2), ("0", 3)]


def test_greedy_rollout_is_compared_with_but_not_trained(run_trainer: RunTrainer) -> None:
    algorithm = {"name": f"{__name__}:AgainstGreedy"}
    run = run_trainer({"num_steps": 1, "tasks_per_step": 2, "algorithm": algorithm, "rollout": {"group_size": 3}})
    assert sorted(params["temperature"] for params in run.params) == [0.0] * 2 + [1.0] * 6
    (batch,) = run.backend.batches
    assert len(batch) <= 6
    assert set(batch.advantages.tolist()) <= {1.0, -1.0}


def test_sampling_requested_by_agents_is_replaced(run_trainer: RunTrainer) -> None:
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    plain = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}

    def agent(word: str, base_url: str) -> float:
        ask(base_url, word, **dict.fromkeys(("temperature", "top_p", "min_p", *plain), 0.5), top_k=2)
        return 1.0

    run = run_trainer({"num_steps": 1, "tasks_per_step": 2, "rollout": {"group_size": 2}}, agent=agent)
    assert len(run.params) == 4
    assert all(params.items() >= {**whole, **plain}.items() for params in run.params)


@pytest.mark.parametrize("wrong", ["filters.ended_by=[timeout]", "filters.truncated=3", "rollout.resample_rounds=-1"])
def test_invalid_filters_are_rejected(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.partition("=")[0].replace(".", r"\.")):
        load_config([wrong])


def test_resampling_requires_several_rollouts_of_a_task() -> None:
    settings = ["algorithm.name=reinforce", "rollout.resample_rounds=2"]
    with pytest.raises(ConfigError, match=r"rollout.resample_rounds=2: .* use rollout.group_size=2 or more"):
        check_fit(load_config([*settings, "rollout.group_size=1"]), demonstrates=False)
    check_fit(load_config([*settings, "rollout.group_size=2"]), demonstrates=False)
    compared_with_the_greedy_one = ["algorithm.name=remax", "rollout.resample_rounds=2", "rollout.group_size=1"]
    check_fit(load_config(compared_with_the_greedy_one), demonstrates=False)
