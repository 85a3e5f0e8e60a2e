import pytest

from rllm.environments.base.multi_turn_env import MultiTurnEnvironment, SingleTurnEnvironment
from rllm.errors import ConfigError, EnvError, RewardError
from rllm.rewards.reward_types import RewardOutput
from rllm.types import Action

TASK = {"question": "How many?", "ground_truth": "3"}


class Guess(MultiTurnEnvironment):
    @staticmethod
    def from_dict(info):
        return Guess(info)

    def get_reward_and_next_obs(self, task, action):
        if action == task["ground_truth"]:
            self.done = True
            return 1.0, "Right."
        return 0.0, f"{action} is wrong."


class Careless(Guess):
    def get_reward_and_next_obs(self, task, action):
        return 1.0


def test_turns_continue_until_the_last():
    env = Guess(TASK, max_turns=2)
    assert env.reset() == (TASK, {})
    assert env.step(Action("1")) == ("1 is wrong.", 0.0, False, {})
    assert env.step("2") == ({}, 0.0, True, {})  # nothing to observe after the end


def test_environment_can_be_reset_to_another_task():
    env = SingleTurnEnvironment(reward_fn=lambda task, action: float(action == task["ground_truth"]))
    for answer, reward in (("3", 1.0), ("4", 0.0)):
        assert env.reset(TASK) == (TASK, {})
        assert env.step(answer)[1] == reward
        assert env.history == [answer]
    assert env.reset() == (TASK, {})
    assert env.history == []


def test_history_is_available_when_a_turn_is_scored():
    class Remembers(Guess):
        def get_reward_and_next_obs(self, task, action):
            return float(len(self.history)), " ".join(self.history)

    env = Remembers(TASK)
    env.reset()
    assert [env.step(action)[:2] for action in ("1", "2")] == [("1", 1.0), ("1 2", 2.0)]


def test_subclass_may_end_early():
    env = Guess(TASK)
    env.reset()
    assert env.step("3") == ({}, 1.0, True, {})
    with pytest.raises(EnvError, match="reset"):
        env.step("3")
    env.reset()
    assert env.step("4")[2] is False


def test_wrong_number_of_return_values_is_reported():
    env = Careless(TASK)
    env.reset()
    with pytest.raises(EnvError, match="get_reward_and_next_obs"):
        env.step("3")


def test_zero_turns_are_rejected():
    with pytest.raises(ConfigError, match="max_turns=0"):
        Guess(TASK, max_turns=0)


def exact(task, action):
    return float(action == task["ground_truth"])


def test_single_answer_is_scored_by_the_reward_function():
    env = SingleTurnEnvironment.from_dict({**TASK, "reward_fn": exact})
    assert env.reset() == (TASK, {})
    assert env.step(Action("3")) == ({}, 1.0, True, {"is_correct": None, "reward_metadata": {}})


def test_task_may_be_a_column_and_env_args_may_name_the_reward():
    row = {"task": TASK, "uid": "7"}
    env_args = SingleTurnEnvironment.prepare_args({"reward_fn": "rllm.rewards.reward_types:RewardOutput"})
    env = SingleTurnEnvironment.from_dict({**row, **env_args})
    assert env.task == TASK
    assert env.reward_fn is RewardOutput


def test_reward_metadata_is_in_the_info():
    env = SingleTurnEnvironment(TASK, lambda task, action: RewardOutput(0.5, {"why": "half"}, is_correct=False))
    assert env.step("3")[3] == {"is_correct": False, "reward_metadata": {"why": "half"}}


def test_reward_of_none_is_unscored():
    assert SingleTurnEnvironment(TASK, lambda task, action: None).step("3")[1] is None
    assert SingleTurnEnvironment(TASK).step("3")[1] is None


@pytest.mark.parametrize(
    ("reward_fn", "message"),
    [
        (None, "reward_fn"),
        (3, "reward_fn=3"),
        ("no.such:thing", "no.such:thing"),
    ],
)
def test_missing_or_invalid_reward_function_is_rejected_at_once(reward_fn: object, message: str):
    with pytest.raises(ConfigError, match=message):
        SingleTurnEnvironment.from_dict({**TASK, "reward_fn": reward_fn})


def test_failing_or_invalid_reward_is_an_error_of_its_function():
    def broken(task, action):
        raise KeyError("ground_truth")

    with pytest.raises(RewardError, match="broken"):
        SingleTurnEnvironment(TASK, broken).step("3")
    with pytest.raises(RewardError):
        SingleTurnEnvironment(TASK, lambda task, action: "good").step("3")
