"""The card player at Gymnasium's own Blackjack table: its observations, its reward, and its training."""

import asyncio

import gymnasium
import pytest

from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.testing.scripted import ScriptedEngine, decode


@pytest.fixture
def play(example):
    """Return the episode of a deal, played by a function of the observed text."""
    agent = example("gymnasium_env", "agent")

    def run(seed, choose):
        engine = AgentExecutionEngine(
            agent_class=agent.CardPlayer,
            env_class=GymnasiumEnv,
            env_args=agent.GAME,
            rollout_engine=ScriptedEngine(lambda messages: choose(messages[-1]["content"])),
            max_steps=10,
        )
        [episode] = asyncio.run(engine.execute_episodes([{"seed": seed}]))
        return episode

    return run


@pytest.mark.parametrize("seed", range(6))
def test_hand_earns_the_reward_of_gymnasium(play, seed):
    episode = play(seed, lambda hand: "hit" if int(hand.removeprefix("soft ").split()[0]) < 17 else "I stick")
    [trajectory] = episode.trajectories

    table = gymnasium.make("Blackjack-v1")
    (total, dealer, ace), _ = table.reset(seed=seed)
    seen, earned, done = [], 0.0, False
    while not done:
        seen.append(f"{'soft ' if ace else ''}{total} against {dealer}")
        (total, dealer, ace), earned, done, *_ = table.step(int(total < 17))
    table.close()

    assert [step.observation for step in trajectory.steps] == seen
    assert trajectory.reward == earned
    assert episode.is_correct == (earned == 1.0)
    assert {decode(step.response_ids) for step in trajectory.steps} <= {"hit", "I stick"}


def test_answer_without_a_move_repeats_the_question(play):
    episode = play(0, lambda text: "stick" if "Legal actions: 0 (stick), 1 (hit)" in text else "double down")
    [trajectory] = episode.trajectories
    assert [step.action for step in trajectory.steps] == ["double down", "stick"]
    assert trajectory.steps[-1].info["num_invalid_actions"] == 1


def test_demonstrations_follow_basic_strategy(example):
    offline = example("gymnasium_env", "offline")
    hands = ["12 against 4", "12 against 10", "17 against 10", "soft 17 against 6", "soft 18 against 1"]
    assert [offline._by_the_book(hand, None) for hand in hands] == ["hit", "hit", "stick", "hit", "stick"]


@pytest.mark.examples
def test_program_trains_any_model(one_step):
    metrics = one_step("gymnasium_env")
    assert metrics["rollout/num_failed"] == 0.0
    assert metrics["rollout/num_steps"] >= 1


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_improves_the_agent(train, seed):
    """As the README states."""
    first, *_, last = train("gymnasium_env", f"seed={seed}")
    assert first["eval/reward"] <= -0.3
    assert last["eval/reward"] >= first["eval/reward"] + 0.25  # always sticking gains 0.2
