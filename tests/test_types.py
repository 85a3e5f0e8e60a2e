from __future__ import annotations

import copy
import json
import pickle
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.types import (
    UNSCORED,
    Action,
    Episode,
    Step,
    TerminationReason,
    Trace,
    Trajectory,
    TrajectoryGroup,
    Unscored,
    is_scored,
    parts_beside_text,
    text_of,
)

TEXT = st.text(max_size=8)
IDS = st.lists(st.integers(0, 200_000), max_size=5)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3)
REWARDS = st.floats(-10, 10) | st.just(UNSCORED)
STEPS = st.builds(
    Step,
    id=TEXT,
    prompt_ids=IDS,
    response_ids=IDS,
    logprobs=st.lists(st.floats(-50, 0), max_size=5),
    chat_completions=MESSAGES,
    observation=JSON,
    thought=TEXT,
    action=JSON,
    model_response=TEXT,
    info=OBJECTS,
    reward=REWARDS,
    done=st.booleans(),
    mc_return=st.floats(-5, 5),
    advantage=st.none() | st.floats(-5, 5),
    weight_version=st.none() | st.integers(0, 99),
    finish_reason=st.none() | TEXT,
)
TRAJECTORIES = st.builds(
    Trajectory,
    uid=TEXT,
    name=TEXT,
    task=JSON,
    steps=st.lists(STEPS, max_size=2),
    reward=REWARDS,
    trainable=st.booleans(),
    input=JSON,
    output=JSON,
    info=OBJECTS,
)
EPISODES = st.builds(
    Episode,
    task=JSON,
    task_id=TEXT.filter(bool),
    index=st.integers(0, 99),
    session_id=TEXT,
    termination_reason=st.none() | st.sampled_from(TerminationReason),
    is_correct=st.booleans(),
    trajectories=st.lists(TRAJECTORIES, max_size=2),
    metrics=st.dictionaries(TEXT, st.floats(-5, 5), max_size=2),
    info=OBJECTS,
)


def scored(episode: Episode) -> list[bool]:
    """Return which rewards were set; `==` is not enough, because an unscored reward equals zero."""
    return [is_scored(item.reward) for path in episode.trajectories for item in (path, *path.steps)]


@given(EPISODES)
def test_episode_round_trip_as_a_dict_is_lossless(episode: Episode) -> None:
    again = Episode.from_dict(episode.to_dict())
    assert again == episode
    assert scored(again) == scored(episode)


@given(EPISODES)
def test_episode_round_trip_as_json_or_pickle_is_lossless(episode: Episode) -> None:
    for again in (Episode.from_dict(json.loads(json.dumps(episode.to_dict()))), pickle.loads(pickle.dumps(episode))):
        assert again == episode
        assert scored(again) == scored(episode)


def test_trace_round_trip_as_a_dict_is_lossless() -> None:
    trace = Trace(
        id="a", call_id="c", session_id="s", model="m", messages=[{"role": "user", "content": "hi"}],
        response={"role": "assistant", "content": "ho"}, prompt_ids=[1], response_ids=[2], logprobs=[-0.5],
        logprobs_kind="processed", sampling={"temperature": 1.0}, weight_version=3, metadata={"k": [1]},
    )  # fmt: skip
    packed: Any = array("I", trace.prompt_ids)
    of_gateway = replace(trace, prompt_ids=packed)
    assert Trace.from_dict(trace.to_dict()) == Trace.from_dict(of_gateway.to_dict()) == trace
    assert Trace.from_dict(json.loads(json.dumps(of_gateway.to_dict()))) == trace


def test_data_written_by_the_rllm_framework_can_be_read() -> None:
    output = {"text": "4", "content": "4", "prompt_ids": [], "completion_ids": [], "prompt_length": 3, "tool_calls": []}
    step = {"prompt_ids": [], "response_ids": [], "model_response": "4", "model_output": output, "reward": 1.0}
    path = {"uid": "u", "name": "solver", "task": None, "steps": [step], "reward": 1.0, "info": {}}
    episode = Episode.from_dict({"id": "t:1", "task": None, "is_correct": True, "trajectories": [path]})
    (again,) = episode.trajectories[0].steps
    assert (again.model_response, again.reward, again.model_output) == ("4", 1.0, None)


def test_action_is_unwrapped() -> None:
    assert Step(action=Action(action="left")).to_dict()["action"] == "left"


def test_unscored_is_zero_in_arithmetic_and_distinguishable() -> None:
    assert UNSCORED == 0.0
    assert UNSCORED + 1.5 == 1.5
    assert sum([UNSCORED, 2.0]) == 2.0
    assert not is_scored(UNSCORED)
    assert not is_scored(None)
    assert is_scored(0.0)
    assert is_scored(0)
    assert is_scored(False)
    assert is_scored(UNSCORED + 0.0), "the result of arithmetic is an ordinary number"
    assert repr(UNSCORED) == "UNSCORED"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copy_of_unscored_is_unscored(copied: Any) -> None:
    assert isinstance(copied(UNSCORED), Unscored)
    assert not is_scored(copied(Step()).reward)
    assert not is_scored(copied(Trajectory(steps=[Step()])).steps[0].reward)


@pytest.mark.parametrize(
    ("reward", "steps", "expected"),
    [
        (UNSCORED, [], None),
        (None, [None, UNSCORED], None),
        (0.0, [5.0], 0.0),
        (UNSCORED, [0.0, UNSCORED], 0.0),
        (UNSCORED, [0.25, UNSCORED, 0.5], 0.75),
        (2.0, [], 2.0),
    ],
)
def test_reward_of_a_trajectory_defaults_to_the_sum_of_its_steps(
    reward: float | None, steps: list[float | None], expected: float | None
) -> None:
    assert Trajectory(reward=reward, steps=[Step(reward=item) for item in steps]).final_reward() == expected


def test_group_keeps_the_rewards_that_were_set() -> None:
    group = TrajectoryGroup(trajectories=[Trajectory(reward=0.0), Trajectory(), Trajectory(reward=1.0)])
    assert group.rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("id", "task_id", "index"),
    [
        ("t:3", "t", 3),
        ("a:b:12", "a:b", 12),
        ("https://x.org:80/q:0", "https://x.org:80/q", 0),
        ("plain", "plain", 0),
        ("a:b", "a:b", 0),
        ("a:-1", "a:-1", 0),
        ("a:", "a:", 0),
    ],
)
def test_id_is_split_at_its_last_colon(id: str, task_id: str, index: int) -> None:
    episode = Episode(id=id)
    assert (episode.task_id, episode.index) == (task_id, index)


def test_fields_take_precedence_over_the_id() -> None:
    episode = Episode(id="a:7", task_id="a:7", index=2)
    assert (episode.id, episode.task_id, episode.index) == ("a:7", "a:7", 2)
    assert Episode(task_id="a:7", index=2).id == "a:7:2"


@given(TEXT.filter(bool), st.integers(0, 10**6))
def test_task_and_index_are_restored_from_the_id(task_id: str, index: int) -> None:
    again = Episode(id=Episode(task_id=task_id, index=index).id)
    assert (again.task_id, again.index) == (task_id, index)


def test_episode_with_an_error_has_failed() -> None:
    assert Episode(info={"error": {}}).failed
    assert not Episode(info={"note": 1}).failed


def test_trajectory_is_cumulative_if_each_step_extends_the_last() -> None:
    one, two = (
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    )
    assert Trajectory(steps=[Step(chat_completions=one), Step(chat_completions=two)]).is_cumulative()
    assert not Trajectory(steps=[Step(chat_completions=two), Step(chat_completions=one)]).is_cumulative()
    assert Trajectory().is_cumulative()


def test_repr_of_a_step_shows_prompt_and_answer() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    step = Step(chat_completions=messages, prompt_ids=[1], response_ids=[2], logprobs=[-1.0], finish_reason="stop")
    assert step.input == {"messages": messages[:1], "prompt_token_ids": [1]}
    assert step.output == {
        "message": messages[1],
        "finish_reason": "stop",
        "choices": [{"index": 0, "message": messages[1], "finish_reason": "stop"}],
        "output_token_ids": [2],
        "rollout_logprobs": [-1.0],
    }
    assert Step().output["message"] is None


def test_steps_have_unique_ids() -> None:
    assert Step().id != Step().id
    assert Trajectory().uid != Trajectory().uid


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text", "text": None}, {"type": "text", "text": 5}, "stray"], "5"),
        ([], ""),
    ],
)
def test_text_of_a_message_joins_its_parts(content: Any, text: str) -> None:
    assert text_of({"role": "user", "content": content}) == text
    assert text_of({"role": "user"}) == ""


def test_kinds_of_non_text_parts_are_listed() -> None:
    parts = [{"type": kind, "text": "?"} for kind in ("text", "input_audio", "image_url", "refusal")]
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "content": None}, {"role": "user", "content": parts}]
    assert parts_beside_text(messages) == ["image_url", "input_audio"]
    assert parts_beside_text([{"content": [{"text": "?"}, "?"]}, "?"]) == []
