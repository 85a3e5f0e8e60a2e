"""The walker on the ice: its observations, its reward, and its training."""

import asyncio

import pytest

from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.environments.grid_world import GridWorldEnv
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.types import TerminationReason

LAKE = {"seed": 5, "size": 3, "p": 0.8}
"""
_ O _
O P G
O _ O
"""


@pytest.fixture
def walk(example):
    """Return the episode of a walk with these answers."""
    walker = example("grid_world", "agent").Walker

    def run(*answers, max_steps=6):
        engine = AgentExecutionEngine(
            agent_class=walker, env_class=GridWorldEnv, rollout_engine=ScriptedEngine(answers), max_steps=max_steps
        )
        [episode] = asyncio.run(engine.execute_episodes([LAKE]))
        return episode

    return run


@pytest.mark.parametrize(
    ("answers", "reward", "reason"),
    [
        (["Right"], 1.0, TerminationReason.ENV_DONE),
        (["Left"], 0.0, TerminationReason.ENV_DONE),  # into a hole
        (["Down", "Down", "Up", "Right"], 1.0, TerminationReason.ENV_DONE),
        (["Down", "Up", "Down"], 0.0, TerminationReason.MAX_TURNS_EXCEEDED),
    ],
)
def test_goal_earns_one(walk, answers, reward, reason):
    episode = walk(*answers, max_steps=len(answers))
    [walker] = episode.trajectories
    assert (walker.name, walker.reward, episode.is_correct) == ("walker", reward, reward == 1.0)
    assert episode.termination_reason is reason
    assert [decode(step.response_ids) for step in walker.steps] == answers
    assert [step.action for step in walker.steps] == answers


def test_walk_is_one_sequence_of_grids_and_moves(walk):
    [walker] = walk("Down", "jump", "Up", "Right").trajectories
    assert [message["content"] for message in walker.steps[1].chat_completions[1:]] == [
        "_ O _\nO P G\nO _ O",
        "Down",
        "_ O _\nO _ G\nO P O",
        "jump",
    ]
    assert walker.steps[2].chat_completions[-2]["content"].startswith("'jump' is")
    for earlier, later in zip(walker.steps, walker.steps[1:], strict=False):
        tokens = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(tokens)] == tokens
    assert [step.reward for step in walker.steps] == [0.0, 0.0, 0.0, 1.0]


def test_demonstrations_take_a_shortest_path(example):
    offline = example("grid_world", "offline")
    assert offline._best(GridWorldEnv.from_dict(LAKE)) == "Right"
    train, held_out = offline.tasks(seed=0)
    assert not {lake["seed"] for lake in train} & {lake["seed"] for lake in held_out}


@pytest.mark.examples
def test_program_trains_any_model(one_step):
    metrics = one_step("grid_world")
    assert metrics["rollout/num_failed"] == 0.0
    assert metrics["rollout/num_steps"] >= 1


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_improves_the_agent(train, seed):
    """As the README states."""
    first, *_, last = train("grid_world", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.5
    assert last["eval/accuracy"] >= 0.8
