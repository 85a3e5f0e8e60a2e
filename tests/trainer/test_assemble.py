from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.errors import TokenMismatchError
from rllm.trainer.assemble import Assembled, assemble
from rllm.types import UNSCORED, Episode, Step, Trajectory, TrajectoryGroup

MEAN_ONLY = GRPO(normalize_std=False)


def step(prompt: Sequence[int] = (1, 2), answer: Sequence[int] = (3, 4)) -> Step:
    return Step(prompt_ids=list(prompt), response_ids=list(answer), logprobs=[-1.0] * len(answer))


def path(
    reward: float | None = UNSCORED, *, name: str = "agent", steps: list[Step] | None = None, **fields: object
) -> Trajectory:
    return Trajectory(name=name, reward=reward, steps=[step()] if steps is None else steps, **fields)  # type: ignore[arg-type]


def episodes_of(*paths: Trajectory, task_id: str = "task") -> list[Episode]:
    """Siblings, each with one trajectory."""
    return [
        Episode(task_id=task_id, index=index, session_id=f"{task_id}-{index}", trajectories=[item])
        for index, item in enumerate(paths)
    ]


def failed(task_id: str = "task") -> Episode:
    return Episode(task_id=task_id, info={"error": {"type": "AgentError", "message": "no", "traceback": ""}})


def assembled(episodes: Sequence[Episode], algorithm: Algorithm = MEAN_ONLY) -> Assembled:
    return assemble(episodes, algorithm, step=7, temperature=0.9)


def test_siblings_become_a_batch_with_their_advantages() -> None:
    result = assembled(episodes_of(path(1.0, steps=[step(answer=[3, 4, 5])]), path(0.0)))
    assert result.batch.ids.tolist() == [3, 4, 5, 3, 4]
    assert result.batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    assert result.batch.weights.tolist() == pytest.approx([0.2] * 5)
    assert result.batch.temperature == 0.9
    assert result.dropped == {}


def test_groups_are_of_one_task_and_one_role() -> None:
    episodes = [
        *episodes_of(path(1.0), path(0.0), task_id="a"),
        *episodes_of(path(5.0), path(3.0), task_id="b"),
        Episode(task_id="a", trajectories=[path(8.0, name="critic")]),
        Episode(task_id="a", trajectories=[path(4.0, name="critic")]),
    ]
    result = assembled(episodes)
    assert result.num_groups == 3
    assert result.batch.advantages[::2].tolist() == [0.5, -0.5, 1.0, -1.0, 2.0, -2.0]
    assert {credit.group_id for credit in result.credits} == {"a/agent", "b/agent", "a/critic"}


def test_what_is_left_out_is_counted_by_its_reason() -> None:
    episodes = [
        *episodes_of(path(1.0), path(0.0), path(), path(1.0, steps=[]), path(1.0, trainable=False)),
        failed(),
        *episodes_of(path(1.0), task_id="alone"),
        *episodes_of(path(0.1), path(0.1), path(0.1), task_id="alike"),
    ]
    result = assembled(episodes)
    assert result.dropped == {
        "unscored": 1,
        "no_tokens": 1,
        "not_trainable": 1,
        "failed": 1,
        "too_few_siblings": 1,
        "zero_variance": 3,
    }
    assert len(result.batch) == 2
    assert (result.num_groups, result.num_uniform_groups) == (3, 2)


def test_failed_and_unscored_rollouts_leave_the_baseline() -> None:
    result = assembled([*episodes_of(path(1.0), path(0.5), path()), failed()])
    assert result.batch.advantages[::2].tolist() == [0.25, -0.25]
    assert {credit.baseline for credit in result.credits} == {0.75, None}


def test_a_reward_of_zero_is_scored() -> None:
    assert assembled(episodes_of(path(0.0), path(1.0))).dropped == {}


def test_rewards_of_steps_add_up() -> None:
    steps = [step(), step([1, 2, 3, 4, 9], [5])]
    steps[0].reward, steps[1].reward = 0.25, 0.5
    result = assembled(episodes_of(path(steps=steps), path(0.25)))
    assert result.batch.advantages.tolist() == [0.25] * 3 + [-0.25] * 2


def test_equal_rewards_weigh_in_the_mean_but_need_no_forward_pass() -> None:
    result = assembled([*episodes_of(path(1.0), path(0.0)), *episodes_of(path(1.0), path(1.0), task_id="alike")])
    assert result.batch.num_tokens == 4
    assert result.batch.weights.tolist() == pytest.approx([1 / 8] * 4)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_is_that_of_the_full_batch(aggregation: str) -> None:
    algorithm = GRPO(normalize_std=False, aggregation=aggregation)  # type: ignore[arg-type]
    lengths, rewards = [1, 2, 3, 4], [1.0, 0.0, 1.0, 1.0]  # the last two are a group of their own
    paths = [path(reward, steps=[step(answer=[3] * n)]) for reward, n in zip(rewards, lengths, strict=True)]
    episodes = [*episodes_of(*paths[:2]), *episodes_of(*paths[2:], task_id="alike")]
    result = assembled(episodes, algorithm)
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    loss, _ = algorithm.loss(logprobs, result.batch)
    loss.backward()
    # By hand over all four sequences: minus advantage x weight, with zeros for the group that is alike.
    weights = {
        "token-mean": [1 / 10, 1 / 10],
        "seq-mean-token-mean": [1 / 4, 1 / 8],
        "seq-mean-token-sum": [1 / 4, 1 / 4],
    }[aggregation]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * weights[0], 0.5 * weights[1], 0.5 * weights[1]])


def test_a_trajectory_without_advantage_among_others_with_one() -> None:
    result = assembled(episodes_of(path(1.0), path(0.5), path(0.0)))
    assert result.batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert result.batch.weights.tolist() == pytest.approx([1 / 6] * 4)
    assert [credit.dropped for credit in result.credits] == [None, None, None], (
        "it was learned from: there was no change"
    )


def test_every_step_gets_a_credit_that_explains_it() -> None:
    good = path(1.0, steps=[step(), step([1, 2, 3, 4, 5], [6]), Step(id="silent")])
    episodes = [*episodes_of(good, path(0.0), path()), failed()]
    result = assembled(episodes)
    steps = [item for episode in episodes for trajectory in episode.trajectories for item in trajectory.steps]
    assert [credit.trace_id for credit in result.credits] == [item.id for item in steps]
    first, second, silent, bad, unscored = result.credits
    assert (first.training_step, first.session_id, first.episode_id) == (7, "task-0", "task:0")
    assert (first.trajectory_name, first.group_id) == ("agent", "task/agent")
    assert (first.reward, first.baseline, first.advantage, first.dropped) == (1.0, 0.5, 0.5, None)
    assert second.advantage == 0.5
    assert silent.dropped == "no_tokens"
    assert (bad.reward, bad.advantage) == (0.0, -0.5)
    assert (unscored.reward, unscored.advantage, unscored.dropped) == (None, None, "unscored")
    assert [item.advantage for item in steps] == [0.5, 0.5, 0.5, -0.5, None], "and so does the step itself"


def test_a_conversation_whose_history_was_edited_counts_as_drift() -> None:
    drifted = path(1.0, steps=[step(), step([1, 2, 9], [5])])
    result = assembled(episodes_of(drifted, path(0.0)))
    assert (result.num_forks, result.num_steps) == (1, 3)
    assert len(result.batch) == 3


def test_tokens_that_do_not_line_up_stop_the_run() -> None:
    broken = Step(prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0])
    with pytest.raises(TokenMismatchError):
        assembled(episodes_of(path(1.0, steps=[broken]), path(0.0)))


def test_a_judge_may_have_no_logprobs() -> None:
    judge = path(1.0, name="judge", steps=[Step(prompt_ids=[1], response_ids=[2, 3])], trainable=False)
    result = assembled([*episodes_of(path(1.0), path(0.0)), Episode(task_id="task", trajectories=[judge])])
    assert result.dropped == {"not_trainable": 1}


def test_nothing_to_learn_from() -> None:
    result = assembled([failed(), *episodes_of(path())])
    assert len(result.batch) == 0
    assert assembled([]).credits == []


def test_whatever_needs_no_siblings_is_trained_alone() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Reinforce(Algorithm):
        def credit(self, group: TrajectoryGroup) -> list[float]:
            return group.rewards

    result = assembled(episodes_of(path(2)), Reinforce())
    assert result.batch.advantages.tolist() == [2.0, 2.0]
    assert result.batch.advantages.dtype == torch.float32


def test_the_batch_is_one_that_knows_its_tree() -> None:
    batch: Batch = assembled(episodes_of(path(1.0), path(0.0))).batch
    assert [batch.tree.ids[place] for place in batch.tree.positions(1)] == [1, 2, 3], "nothing follows the last token"
