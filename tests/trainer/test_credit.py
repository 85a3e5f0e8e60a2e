from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.otb import OTB
from rllm.algorithms.ppo import PPO
from rllm.algorithms.reinforce import ReinforcePlusPlus, ReMax
from rllm.errors import ConfigError, TokenMismatchError
from rllm.trainer.credit import Assembled, assemble
from rllm.types import (
    NUM_SIDE_CALLS_KEY,
    NUM_UNUSABLE_CALLS_KEY,
    REFERENCE_KEY,
    UNSCORED,
    Episode,
    Step,
    Trajectory,
    TrajectoryGroup,
)

MEAN_ONLY = GRPO(normalize_std=False)


def step(prompt: Sequence[int] = (1, 2), answer: Sequence[int] = (3, 4)) -> Step:
    return Step(prompt_ids=list(prompt), response_ids=list(answer), logprobs=[-1.0] * len(answer))


def path(
    reward: float | None = UNSCORED, *, name: str = "agent", steps: list[Step] | None = None, **fields: object
) -> Trajectory:
    return Trajectory(name=name, reward=reward, steps=[step()] if steps is None else steps, **fields)  # type: ignore[arg-type]


def episodes_of(*paths: Trajectory, task_id: str = "task") -> list[Episode]:
    """Return sibling episodes, each with one of these trajectories."""
    return [
        Episode(task_id=task_id, index=index, session_id=f"{task_id}-{index}", trajectories=[item])
        for index, item in enumerate(paths)
    ]


def failed(task_id: str = "task") -> Episode:
    return Episode(task_id=task_id, info={"error": {"type": "AgentError", "message": "no", "traceback": ""}})


def assembled(
    episodes: Sequence[Episode], algorithm: Algorithm = MEAN_ONLY, scorer: TableScorer | None = None
) -> Assembled:
    return assemble(episodes, algorithm, step=7, temperature=0.9, scorer=scorer)


@dataclass
class TableScorer:
    """Log-probabilities and values by token id; 0 for tokens that are not in the table."""

    policy: Mapping[int, float] = field(default_factory=dict)
    reference: Mapping[int, float] = field(default_factory=dict)
    critic: Mapping[int, float] = field(default_factory=dict)

    def score(self, batch: Batch) -> Tensor:
        return self._of(batch, self.policy)

    def score_reference(self, batch: Batch) -> Tensor:
        return self._of(batch, self.reference)

    def values(self, batch: Batch) -> Tensor:
        return self._of(batch, self.critic)

    def energies(self, batch: Batch) -> Tensor:
        return torch.ones(batch.num_tokens)

    def _of(self, batch: Batch, table: Mapping[int, float]) -> Tensor:
        return torch.tensor([table.get(token, 0.0) for token in batch.ids.tolist()])


TRUSTING = PPO(gae_lambda=1.0, whiten=False)
"""Advantages are the rewards from the token on, minus the critic's estimate."""


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


def test_dropped_rollouts_are_counted_by_reason() -> None:
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
        "error": 1,
        "too_few_siblings": 1,
        "zero_variance": 3,
    }
    assert len(result.batch) == 2
    assert (result.num_groups, result.num_uniform_groups) == (3, 1)


def test_lost_calls_of_a_trajectory_are_counted() -> None:
    lost = path(1.0, info={NUM_SIDE_CALLS_KEY: 1, NUM_UNUSABLE_CALLS_KEY: 2})
    assert assembled(episodes_of(lost, path(0.0))).dropped == {"side_call": 1, "unusable_call": 2}


def test_failed_and_unscored_rollouts_are_left_out_of_the_baseline() -> None:
    result = assembled([*episodes_of(path(1.0), path(0.5), path()), failed()])
    assert result.batch.advantages[::2].tolist() == [0.25, -0.25]
    assert {credit.baseline for credit in result.credits} == {0.75, None}


def test_reward_of_zero_is_scored() -> None:
    assert assembled(episodes_of(path(0.0), path(1.0))).dropped == {}


def test_step_rewards_are_summed() -> None:
    steps = [step(), step([1, 2, 3, 4, 9], [5])]
    steps[0].reward, steps[1].reward = 0.25, 0.5
    result = assembled(episodes_of(path(steps=steps), path(0.25)))
    assert result.batch.advantages.tolist() == [0.25] * 3 + [-0.25] * 2


def test_equal_rewards_count_in_the_mean_without_a_forward_pass() -> None:
    result = assembled([*episodes_of(path(1.0), path(0.0)), *episodes_of(path(1.0), path(1.0), task_id="alike")])
    assert result.batch.num_tokens == 4
    assert result.batch.weights.tolist() == pytest.approx([1 / 8] * 4)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_gradient_equals_that_of_the_full_batch(aggregation: str) -> None:
    algorithm = GRPO(normalize_std=False, aggregation=aggregation)  # type: ignore[arg-type]
    lengths, rewards = [1, 2, 3, 4], [1.0, 0.0, 1.0, 1.0]  # the last two are a group of their own
    paths = [path(reward, steps=[step(answer=[3] * n)]) for reward, n in zip(rewards, lengths, strict=True)]
    episodes = [*episodes_of(*paths[:2]), *episodes_of(*paths[2:], task_id="alike")]
    result = assembled(episodes, algorithm)
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    loss, _ = algorithm.loss(logprobs, result.batch)
    loss.backward()
    # By hand over all four sequences: minus advantage x weight, with zeros for the group with equal rewards.
    weights = {
        "token-mean": [1 / 10, 1 / 10],
        "seq-mean-token-mean": [1 / 4, 1 / 8],
        "seq-mean-token-sum": [1 / 4, 1 / 4],
    }[aggregation]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * weights[0], 0.5 * weights[1], 0.5 * weights[1]])


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        # Tokens of the first rollout's three segments (1, 2 and 3 long), then of the second's one segment (2 long).
        ("token-mean", [1 / 8] * 8),
        ("trajectory-mean-token-mean", [1 / 12] * 6 + [1 / 4] * 2),
        ("seq-mean-token-mean", [1 / 4, *[1 / 8] * 2, *[1 / 12] * 3, *[1 / 8] * 2]),
    ],
)
def test_weight_of_a_rollout_of_three_segments_matches_hand_computed_values(
    aggregation: str, weights: list[float]
) -> None:
    compacted = path(1.0, steps=[step([9, 1], [3]), step([9, 2], [3] * 2), step([9, 3], [3] * 3)])
    algorithm = GRPO(normalize_std=False, aggregation=aggregation)  # type: ignore[arg-type]
    batch = assembled(episodes_of(compacted, path(0.0, steps=[step(answer=[3] * 2)])), algorithm).batch
    assert batch.advantages.tolist() == [0.5] * 6 + [-0.5] * 2, "each segment has the advantage of its rollout"
    assert batch.weights.tolist() == pytest.approx(weights)


def test_trajectory_of_mean_reward_is_not_dropped() -> None:
    result = assembled(episodes_of(path(1.0), path(0.5), path(0.0)))
    assert result.batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert result.batch.weights.tolist() == pytest.approx([1 / 6] * 4)
    assert [credit.dropped for credit in result.credits] == [None, None, None], "advantage 0 is not a reason to drop it"


def test_each_step_has_a_credit_that_explains_it() -> None:
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
    assert [item.advantage for item in steps] == [0.5, 0.5, 0.5, -0.5, None], "each step has its advantage, too"


def test_conversation_with_edited_history_counts_as_drift() -> None:
    drifted = path(1.0, steps=[step(), step([1, 2, 9], [5])])
    result = assembled(episodes_of(drifted, path(0.0)))
    assert (result.num_forks, result.num_steps) == (1, 3)
    assert len(result.batch) == 3


def test_misaligned_tokens_stop_the_run() -> None:
    broken = Step(prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0])
    with pytest.raises(TokenMismatchError):
        assembled(episodes_of(path(1.0, steps=[broken]), path(0.0)))


def test_untrained_judge_needs_no_logprobs() -> None:
    judge = path(1.0, name="judge", steps=[Step(prompt_ids=[1], response_ids=[2, 3])], trainable=False)
    result = assembled([*episodes_of(path(1.0), path(0.0)), Episode(task_id="task", trajectories=[judge])])
    assert result.dropped == {"not_trainable": 1}


def test_batch_without_advantage_is_empty() -> None:
    result = assembled([failed(), *episodes_of(path())])
    assert len(result.batch) == 0
    assert assembled([]).credits == []


def test_trajectory_without_siblings_is_trained_if_the_algorithm_needs_none() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Reinforce(Algorithm):
        def credit(self, group: TrajectoryGroup) -> list[float]:
            return group.rewards

    result = assembled(episodes_of(path(2)), Reinforce())
    assert result.batch.advantages.tolist() == [2.0, 2.0]
    assert result.batch.advantages.dtype == torch.float32


def test_batch_has_its_token_tree() -> None:
    batch: Batch = assembled(episodes_of(path(1.0), path(0.0))).batch
    assert [batch.tree.ids[place] for place in batch.tree.positions(1)] == [1, 2, 3], "nothing follows the last token"


def greedy() -> dict[str, Any]:
    """Return the info of a trajectory of a greedy attempt."""
    return {"trainable": False, "info": {REFERENCE_KEY: True}}


def test_group_is_compared_with_its_greedy_rollout() -> None:
    compared = path(0.25, **greedy())
    result = assembled(episodes_of(path(1.0), path(0.0), compared), ReMax())
    assert result.batch.advantages[::2].tolist() == [0.75, -0.25]
    assert {credit.baseline for credit in result.credits} == {0.25, None}
    assert result.dropped == {"not_trainable": 1}


def test_group_without_greedy_rollout_is_left_out_of_the_mean() -> None:
    with_greedy = episodes_of(path(1.0), path(0.25, **greedy()))
    without = episodes_of(path(1.0), path(None, **greedy()), task_id="other")
    result = assembled([*with_greedy, *without], ReMax())
    assert result.batch.weights.tolist() == [0.5, 0.5]
    assert result.dropped == {"not_trainable": 2, "no_greedy_rollout": 1}


def test_untrained_opponents_are_not_greedy_rollouts() -> None:
    def match(won: float, lost: float, **ours: Any) -> Episode:
        return Episode(task_id="task", trajectories=[path(won, **ours), path(lost, trainable=False)])

    played = [match(1.0, -1.0), match(0.5, -0.5)]
    result = assembled([*played, match(0.75, -0.75, **greedy())], ReMax())
    assert result.batch.advantages[::2].tolist() == [0.25, -0.25]
    assert assembled(played, ReMax()).dropped == {"not_trainable": 2, "no_greedy_rollout": 2}


def two_turns(first: float, second: float) -> Trajectory:
    """Return one sequence of two steps that sampled 3, 4 and then 6, each with its reward."""
    steps = [step(), step([1, 2, 3, 4, 5], [6])]
    steps[0].reward, steps[1].reward = first, second
    return path(steps=steps)


def test_steps_are_compared_with_steps_at_the_same_position() -> None:
    result = assembled(
        episodes_of(two_turns(1.0, 2.0), two_turns(0.0, 4.0)), GRPO(normalize_std=False, level="step", gamma=0.5)
    )
    # Returns are 1 + 2/2 = 2 and 2; 0 + 4/2 = 2 and 4.
    assert result.batch.advantages.tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 1.0]
    assert (result.num_groups, result.num_uniform_groups) == (2, 1)
    assert [credit.dropped for credit in result.credits] == ["zero_variance", None] * 2
    assert [credit.reward for credit in result.credits] == [2.0, 2.0, 2.0, 4.0]


def test_step_without_siblings_is_counted_but_not_trained() -> None:
    result = assembled(episodes_of(two_turns(1.0, 2.0), path(1.0)), GRPO(normalize_std=False, level="step"))
    assert result.batch.advantages.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0]
    assert [credit.dropped for credit in result.credits] == [None, "too_few_siblings", None]
    assert result.dropped == {}


def test_divergence_is_subtracted_from_the_reward_of_a_trajectory() -> None:
    scorer = TableScorer(policy={4: -1.0, 6: -1.0}, reference={4: -1.5, 6: -2.0})
    algorithm = GRPO(normalize_std=False, kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    result = assembled(episodes_of(two_turns(1.0, 2.0), path(2.25)), algorithm, scorer)
    # 3 - 0.5 * (0.5 + 1.0) = 2.25 and 2.25 - 0.5 * 0.5 = 2.0
    assert [credit.advantage for credit in result.credits] == [0.125, 0.125, -0.125]


def test_divergence_is_discounted_like_rewards() -> None:
    scorer = TableScorer(policy={4: -1.0, 6: -1.0}, reference={4: -1.5, 6: -2.0})
    algorithm = GRPO(normalize_std=False, kl_coef=1.0, kl_in="reward", kl_estimator="k1", level="step", gamma=0.5)
    result = assembled(episodes_of(two_turns(1.0, 2.0), two_turns(1.0, 4.0)), algorithm, scorer)
    # Both lose 0.5 + 0.5 * 1.0 at the first token and 1.0 at the second, so that the rewards alone decide.
    assert [credit.baseline for credit in result.credits] == [1.5, 2.0, 1.5, 2.0]
    assert [credit.advantage for credit in result.credits] == [-0.5, -1.0, 0.5, 1.0]


def test_equal_rewards_are_uniform_despite_critic_and_divergence() -> None:
    scorer = TableScorer(policy={4: -1.0}, reference={3: -0.5, 4: -1.5}, critic={3: 0.25})
    penalized = ReinforcePlusPlus(kl_coef=0.5, kl_in="reward")
    for algorithm in (TRUSTING, penalized):
        alike = assembled(episodes_of(path(1.0), path(1.0)), algorithm, scorer)
        assert alike.batch.advantages.any()
        assert (alike.num_groups, alike.num_uniform_groups) == (1, 1)
        assert assembled(episodes_of(path(1.0), path(0.0)), algorithm, scorer).num_uniform_groups == 0

    def separately(*rewards: float) -> Assembled:
        episodes = [episodes_of(path(reward), task_id=str(row))[0] for row, reward in enumerate(rewards)]
        return assembled(episodes, TRUSTING, scorer)

    assert separately(1.0, 1.0).num_uniform_groups == 2
    apart = [episodes_of(path(1.0), task_id=task)[0] for task in "ab"]
    assert assembled(apart).num_uniform_groups == 0, "they lack siblings, and were not compared"
    assert separately(1.0, 0.0).num_uniform_groups == separately(1.0).num_uniform_groups == 0


def test_divergence_in_the_loss_keeps_sequences_without_advantage() -> None:
    scorer = TableScorer(reference={3: -2.0, 4: -3.0})
    result = assembled(episodes_of(path(1.0), path(1.0)), GRPO(kl_coef=0.1), scorer)
    assert result.batch.advantages.tolist() == [0.0] * 4
    assert result.batch.ref_logprobs is not None
    assert result.batch.ref_logprobs.tolist() == [-2.0, -3.0] * 2
    assert result.num_uniform_groups == 1
    assert result.dropped == {}


def test_divergence_in_the_loss_needs_no_scoring_first() -> None:
    batch = assembled(episodes_of(path(1.0)), PPO(kl_coef=0.1), TableScorer(reference={3: -2.0, 4: -3.0})).batch
    assert batch.old_logprobs is None
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs.tolist() == [-2.0, -3.0]


def test_critic_gets_each_reward_at_the_last_token_of_its_step() -> None:
    scorer = TableScorer(critic={3: 0.5, 4: 1.0, 6: 1.5})
    result = assembled(episodes_of(two_turns(1.0, 2.0)), TRUSTING, scorer)
    assert result.batch.rewards is not None
    assert result.batch.returns is not None
    assert result.batch.rewards.tolist() == [0.0, 1.0, 2.0]
    assert result.batch.returns.tolist() == [3.0, 3.0, 2.0]
    assert result.batch.advantages.tolist() == [2.5, 2.0, 0.5]
    assert [credit.advantage for credit in result.credits] == [2.25, 0.5], "the mean of each step's tokens"
    assert result.advantages == pytest.approx([5.0 / 3])


def test_reward_of_a_step_without_tokens_reaches_the_critic() -> None:
    trajectory = two_turns(1.0, 2.0)
    trajectory.steps.insert(1, Step(id="silent", reward=4.0))
    result = assembled(episodes_of(trajectory), TRUSTING, TableScorer())
    assert result.batch.advantages.tolist() == [7.0, 7.0, 2.0]
    assert [credit.dropped for credit in result.credits] == [None, "no_tokens", None]


def test_divergence_is_subtracted_from_the_reward_of_its_own_token() -> None:
    scorer = TableScorer(policy={3: -1.0, 6: -1.0}, reference={3: -2.0, 6: -1.5})
    algorithm = PPO(gae_lambda=1.0, whiten=False, kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    result = assembled(episodes_of(two_turns(1.0, 2.0)), algorithm, scorer)
    assert result.batch.rewards is not None
    assert result.batch.rewards.tolist() == [-0.5, 1.0, 1.75]
    assert result.batch.advantages.tolist() == [2.25, 2.75, 1.75]


def test_tokens_are_credited_in_the_order_of_sampling() -> None:
    """The second step starts a new sequence, and the third continues that of the first."""
    aside = step([1, 9], [7])
    steps = [step(), aside, step([1, 2, 3, 4, 5], [6])]
    steps[0].reward, steps[1].reward, steps[2].reward = 1.0, 2.0, 4.0
    result = assembled(episodes_of(path(steps=steps)), PPO(gae_lambda=1.0, whiten=False, gamma=0.5), TableScorer())
    assert result.batch.ids.tolist() == [3, 4, 6, 7]
    # Chosen were 3, 4, 7, 6, with rewards 0, 1, 2, 4: the returns are 1.5, 3, 4, 4.
    assert result.batch.advantages.tolist() == [1.5, 3.0, 4.0, 4.0]
    assert result.batch.rewards is not None
    assert result.batch.rewards.tolist() == [0.0, 1.0, 4.0, 2.0]
    assert result.num_forks == 1


def test_tokens_are_credited_without_a_critic() -> None:
    result = assembled(episodes_of(path(1.0), path(0.0)), ReinforcePlusPlus())
    assert result.batch.advantages.tolist() == pytest.approx([1.0, 1.0, -1.0, -1.0])
    assert result.batch.returns is None, "only a critic needs returns"


@pytest.mark.parametrize("given", [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan], [1.0, math.inf]], ids=str)
def test_token_advantages_must_be_one_number_per_token(given: list[float]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(ReinforcePlusPlus):
        def token_advantages(self, batch: Batch) -> tuple[Tensor, None]:
            return torch.tensor(given), None

    with pytest.raises(ConfigError, match=r"Mine.token_advantages .* 2 tokens"):
        assembled(episodes_of(path(1.0)), Mine())


def test_nan_of_a_critic_is_not_attributed_to_the_algorithm() -> None:
    ids = dict.fromkeys(range(100), math.nan)
    result = assembled(episodes_of(path(1.0)), PPO(), TableScorer(critic=ids))
    assert result.batch.advantages.isnan().all()


def test_batch_without_rewards_is_empty_despite_a_critic() -> None:
    assert len(assembled([failed(), *episodes_of(path())], PPO(), TableScorer()).batch) == 0


def test_call_shared_by_two_trajectories_is_credited_in_each() -> None:
    shared = step()
    planner, team = path(1.0, name="planner", steps=[shared]), path(0.0, name="team", steps=[shared])
    siblings = [path(0.0, name="planner"), path(1.0, name="team")]
    episodes = [
        Episode(task_id="task", index=0, trajectories=[planner, team]),
        Episode(task_id="task", index=1, trajectories=siblings),
    ]
    assert assembled(episodes).batch.advantages[::2].tolist() == [0.5, -0.5, -0.5, 0.5]


@st.composite
def random_episodes(draw: st.DrawFn) -> list[Episode]:
    """Draw episodes of up to three tasks: failed, unscored and frozen ones, forks, and steps without tokens."""
    episodes = []
    for number in range(draw(st.integers(0, 8))):
        task_id = f"task{draw(st.integers(0, 2))}"
        if draw(st.booleans()) and draw(st.booleans()):
            episodes.append(failed(task_id))
            continue
        paths = [draw(random_trajectory(name)) for name in draw(st.sets(st.sampled_from(["solver", "judge"])))]
        episodes.append(Episode(task_id=task_id, index=number, trajectories=paths))
    return episodes


@st.composite
def random_trajectory(draw: st.DrawFn, name: str) -> Trajectory:
    steps: list[Step] = []
    seen = [1]
    for _ in range(draw(st.integers(0, 3))):
        prompt = [*seen, 2] if draw(st.booleans()) else [9]
        answer = draw(st.lists(st.integers(3, 5), max_size=3))
        steps.append(step(prompt, answer))
        seen = [*prompt, *answer]
    reward = draw(st.sampled_from([UNSCORED, 0.0, 0.5, 1.0]))
    return path(reward, name=name, steps=steps, trainable=draw(st.sampled_from([True, True, True, False])))


def plain_advantages(episodes: Sequence[Episode]) -> tuple[dict[str, float], int]:
    """Compute a plain GRPO: return the advantage of each step that changes the weights, and the number of tokens
    of the mean."""
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    for episode in episodes:
        for item in episode.trajectories:
            spoke = any(step.response_ids for step in item.steps)
            if not episode.failed and item.trainable and spoke and item.reward is not UNSCORED:
                groups.setdefault((episode.task_id, item.name), []).append(item)
    advantages, num_tokens = {}, 0
    for members in groups.values():
        if len(members) < 2:
            continue
        for item in members:
            for made in item.steps:
                num_tokens += len(made.response_ids)
                advantage = (item.reward or 0.0) - mean(float(other.reward or 0.0) for other in members)
                if advantage and made.response_ids:
                    advantages[made.id] = advantage
    return advantages, num_tokens


@given(random_episodes())
def test_batch_equals_a_plain_loop_over_random_episodes(episodes: list[Episode]) -> None:
    result = assembled(episodes)
    expected, num_tokens = plain_advantages(episodes)
    steps = {item.id: item for episode in episodes for member in episode.trajectories for item in member.steps}
    place, found = 0, {}
    for sequence in result.batch.sequences:
        for span in sequence.spans:
            size = span.stop - span.start
            assert sequence.ids[: span.stop] == steps[span.step_id].prompt_ids + steps[span.step_id].response_ids
            (found[span.step_id],) = set(result.batch.advantages[place : place + size].tolist())
            place += size
    assert found == pytest.approx(expected)
    assert result.batch.weights.tolist() == pytest.approx([1 / max(num_tokens, 1)] * place)
    assert {credit.trace_id for credit in result.credits} == steps.keys()
    explained = {
        credit.trace_id: credit.advantage for credit in result.credits if credit.advantage and not credit.dropped
    }
    assert explained == pytest.approx(expected), "each credit has the advantage that its step was trained with"


CRITIC = {3: 0.25, 4: -0.5, 5: 1.0}


def plain_gae(trajectory: Trajectory, gamma: float, gae_lambda: float) -> dict[str, list[float]]:
    """Return the advantages of each step's tokens by the double sum of the paper, in the order of the calls."""
    tokens = [(made.id, CRITIC[token]) for made in trajectory.steps for token in made.response_ids]
    rewards = [0.0] * (len(tokens) - 1) + [float(trajectory.reward or 0.0)]
    following = [*(value for _, value in tokens[1:]), 0.0]
    surprises = [
        reward + gamma * after - value for reward, after, (_, value) in zip(rewards, following, tokens, strict=True)
    ]
    found: dict[str, list[float]] = {}
    for place, (step_id, _) in enumerate(tokens):
        rest = enumerate(surprises[place:])
        found.setdefault(step_id, []).append(sum((gamma * gae_lambda) ** n * later for n, later in rest))
    return found


@given(random_episodes())
def test_token_credit_equals_a_plain_loop_over_random_episodes(episodes: list[Episode]) -> None:
    result = assembled(episodes, PPO(gamma=0.9, gae_lambda=0.8, whiten=False), TableScorer(critic=CRITIC))
    expected: dict[str, list[float]] = {}
    for episode in episodes:
        for item in episode.trajectories:
            spoke = any(made.response_ids for made in item.steps)
            if item.trainable and spoke and item.reward is not UNSCORED:
                expected |= plain_gae(item, 0.9, 0.8)
    place, found = 0, {}
    for sequence in result.batch.sequences:
        for span in sequence.spans:
            size = span.stop - span.start
            found[span.step_id] = result.batch.advantages[place : place + size].tolist()
            place += size
    assert found.keys() == expected.keys()
    assert [value for step_id in found for value in found[step_id]] == pytest.approx(
        [value for step_id in found for value in expected[step_id]], abs=1e-5
    )


def test_positions_are_compared_within_their_group() -> None:
    """OTB, with energies of 1: at the last of two positions siblings have the same sum."""
    episodes = [
        *episodes_of(path(1.0), path(0.0), task_id="one"),
        *episodes_of(path(4.0), path(2.0), task_id="other"),
    ]
    found = assembled(episodes, OTB(), TableScorer())
    assert found.batch.advantages.tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5, 1.0, 1.0, -1.0, -1.0])
    assert found.batch.group_of is None
