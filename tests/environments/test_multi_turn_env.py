import pytest

from rllm.environments.base.multi_turn_env import MultiTurnEnvironment
from rllm.environments.base.single_turn_env import SingleTurnEnvironment
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


def test_turns_go_on_until_the_last():
    env = Guess(TASK, max_turns=2)
    assert env.reset() == (TASK, {})
    assert env.step(Action("1")) == ("1 is wrong.", 0.0, False, {})
    assert env.step("2") == ({}, 0.0, True, {})  # nothing to observe after the end


def test_another_task_may_be_begun_with_in_the_same_environment():
    env = SingleTurnEnvironment(reward_fn=lambda task, action: float(action == task["ground_truth"]))
    for answer, reward in (("3", 1.0), ("4", 0.0)):
        assert env.reset(TASK) == (TASK, {})
        assert env.step(answer)[1] == reward
        assert env.history == [answer]
    assert env.reset() == (TASK, {})
    assert env.history == []


def test_what_was_done_is_known_when_a_turn_is_judged():
    class Remembers(Guess):
        def get_reward_and_next_obs(self, task, action):
            return float(len(self.history)), " ".join(self.history)

    env = Remembers(TASK)
    env.reset()
    assert [env.step(action)[:2] for action in ("1", "2")] == [("1", 1.0), ("1 2", 2.0)]


def test_a_subclass_ends_early():
    env = Guess(TASK)
    env.reset()
    assert env.step("3") == ({}, 1.0, True, {})
    with pytest.raises(EnvError, match="reset"):
        env.step("3")
    env.reset()
    assert env.step("4")[2] is False


def test_a_return_of_the_wrong_arity_is_named():
    env = Careless(TASK)
    env.reset()
    with pytest.raises(EnvError, match="get_reward_and_next_obs"):
        env.step("3")


def test_no_turns_are_refused():
    with pytest.raises(ConfigError, match="max_turns=0"):
        Guess(TASK, max_turns=0)


def exact(task, action):
    return float(action == task["ground_truth"])


def test_one_answer_is_scored_by_the_reward_function():
    env = SingleTurnEnvironment.from_dict({**TASK, "reward_fn": exact})
    assert env.reset() == (TASK, {})
    assert env.step(Action("3")) == ({}, 1.0, True, {"is_correct": None, "reward_metadata": {}})


def test_the_task_may_be_a_column_of_its_own_and_env_args_may_name_the_reward_function():
    row = {"task": TASK, "uid": "7"}
    env_args = SingleTurnEnvironment.prepare_args({"reward_fn": "rllm.rewards.reward_types:RewardOutput"})
    env = SingleTurnEnvironment.from_dict({**row, **env_args})
    assert env.task == TASK
    assert env.reward_fn is RewardOutput


def test_what_the_reward_says_beside_its_number_is_in_the_info():
    env = SingleTurnEnvironment(TASK, lambda task, action: RewardOutput(0.5, {"why": "half"}, is_correct=False))
    assert env.step("3")[3] == {"is_correct": False, "reward_metadata": {"why": "half"}}


def test_none_is_unscored():
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
def test_a_missing_or_wrong_reward_function_is_refused_at_once(reward_fn: object, message: str):
    with pytest.raises(ConfigError, match=message):
        SingleTurnEnvironment.from_dict({**TASK, "reward_fn": reward_fn})


def test_a_reward_that_raises_or_returns_no_number_is_named():
    def broken(task, action):
        raise KeyError("ground_truth")

    with pytest.raises(RewardError, match="broken"):
        SingleTurnEnvironment(TASK, broken).step("3")
    with pytest.raises(RewardError):
        SingleTurnEnvironment(TASK, lambda task, action: "good").step("3")
