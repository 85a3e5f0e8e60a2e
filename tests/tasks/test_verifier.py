"""Rewards in files of verifiers, parsed as in Harbor."""

import json
from pathlib import Path

import pytest

from rllm.errors import RewardError
from rllm.tasks.verifier import reward_in

READINGS = json.loads(Path(__file__).with_name("harbor_readings.json").read_text())["rewards"]


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: f"{reading['name']}: {reading['text'].strip()}")
def test_rewards_are_parsed_as_in_harbor(reading):
    theirs = reading["read"]
    if theirs is None:
        with pytest.raises(RewardError, match=reading["name"]):
            reward_in(reading["name"], reading["text"])
        return
    reward, parts = reward_in(reading["name"], reading["text"])
    if not isinstance(theirs, dict):
        assert (reward, parts) == (theirs, {})
    elif reading["name"] == "reward.txt":
        assert (reward, parts) == (theirs["reward"], {})
    else:
        assert parts == theirs
        assert reward == theirs.get("reward", sum(theirs.values()))


@pytest.mark.parametrize(
    ("name", "content"), [("", ""), ("odd", ""), ("reward.json", "{}"), ("reward.json", "9" * 999)]
)
def test_reward_without_a_number_is_none(name, content):
    with pytest.raises(RewardError, match="reward"):
        reward_in(name, content)
