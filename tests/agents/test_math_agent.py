import pytest

from rllm.agents.chat_agent import INSTRUCTION, MathAgent
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.errors import RewardError
from rllm.types import UNSCORED


def boxed(task, action):
    return float(f"\\boxed{{{task['ground_truth']}}}" in action)


TASK = {"question": "What is 2 + 2?", "ground_truth": "4"}


async def test_question_is_answered_and_scored(play):
    env = SingleTurnEnvironment.from_dict({**TASK, "reward_fn": boxed})
    trajectory = await play(MathAgent(), env, ["<think>2 + 2 is 4</think>It is \\boxed{4}."])

    (step,) = trajectory.steps
    assert step.chat_completions[0] == {"role": "user", "content": f"What is 2 + 2?\n\n{INSTRUCTION}"}
    assert step.thought == "2 + 2 is 4"
    assert (step.reward, step.done) == (1.0, True)


async def test_reward_of_none_stays_unscored(play):
    trajectory = await play(MathAgent(), SingleTurnEnvironment(TASK, lambda task, action: None), ["5"])
    assert trajectory.steps[0].reward is None
    assert trajectory.final_reward() is None
    assert UNSCORED == 0.0  # so a comparison with 0 is not possible


async def test_error_in_a_reward_function_names_it(play):
    def broken_reward(task, action):
        return 1 / 0

    with pytest.raises(RewardError, match="broken_reward raised ZeroDivisionError"):
        await play(MathAgent(), SingleTurnEnvironment(TASK, broken_reward), ["5"])


def test_instruction_is_given_once():
    agent = MathAgent(accumulate_thinking=True)
    agent.update_from_env(TASK, 0.0, False, {})
    agent.update_from_model("5")
    agent.update_from_env("That is wrong. Try again.", 0.0, False, {})
    assert [message["content"].count(INSTRUCTION) for message in agent.chat_completions] == [1, 0, 0]
