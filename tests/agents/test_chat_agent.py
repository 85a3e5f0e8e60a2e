import pytest

from rllm.agents.chat_agent import ChatAgent
from rllm.errors import AgentError
from rllm.types import Action, is_scored


class Echo(ChatAgent):
    def response_to_action(self, response: str) -> str:
        return response.upper()


def test_each_response_adds_one_step_and_returns_an_action():
    agent = Echo(system_prompt="Be brief.")
    agent.update_from_env({"question": "2 + 2?"}, 0.0, False, {})

    assert agent.update_from_model("<think>easy</think>four") == Action("<THINK>EASY</THINK>FOUR")

    (step,) = agent.trajectory.steps
    assert agent.get_current_state() is step
    assert step.chat_completions == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>easy</think>four"},
    ]
    assert (step.thought, step.action) == ("easy", "<THINK>EASY</THINK>FOUR")
    assert step.model_response == "<think>easy</think>four"
    assert step.observation == {"question": "2 + 2?"}
    assert not is_scored(step.reward)  # set by the engine


def test_prompts_are_append_only():
    agent = Echo()
    for turn in range(3):
        agent.update_from_env(f"turn {turn}", 0.0, False, {})
        agent.update_from_model(f"<think>hm</think>answer {turn}")
    assert agent.trajectory.is_cumulative()


def test_earlier_reasoning_is_left_out_of_prompts_if_configured():
    agent = Echo(accumulate_thinking=False)
    for turn in range(2):
        agent.update_from_env(f"turn {turn}", 0.0, False, {})
        agent.update_from_model(f"<think>hm</think>answer {turn}")

    first, second = agent.trajectory.steps
    assert first.chat_completions[-1]["content"] == "<think>hm</think>answer 0"
    assert [message["content"] for message in second.chat_completions] == [
        "turn 0",
        "answer 0",
        "turn 1",
        "<think>hm</think>answer 1",
    ]


def test_reasoning_opened_in_the_prompt_is_parsed_as_reasoning():
    agent = Echo(accumulate_thinking=False)
    agent.update_from_model("let me see</think>four")
    assert agent.trajectory.steps[0].thought == "let me see"
    assert agent.chat_completions == [{"role": "assistant", "content": "four"}]


def test_reset_clears_the_conversation():
    agent = Echo(system_prompt="Be brief.")
    agent.update_from_env("hello", 0.0, False, {})
    agent.update_from_model("hi")
    finished = agent.trajectory

    agent.reset()

    assert agent.chat_completions == [{"role": "system", "content": "Be brief."}]
    assert agent.get_current_state() is None
    assert len(finished.steps) == 1  # the old trajectory is unchanged


def test_end_of_rollout_adds_no_message():
    agent = Echo()
    agent.update_from_env("You won.", 1.0, True, {})
    assert agent.chat_completions == []


@pytest.mark.parametrize("observation", [{"image": b"..."}, 42, ["a", "b"]])
def test_observation_without_readable_text_is_rejected(observation: object):
    with pytest.raises(AgentError, match=r"observation is .*: return a text, or a task with one of question"):
        Echo().update_from_env(observation, 0.0, False, {})
