"""Validation of what users' code returns."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from rllm.engine.failures import failed_episode, why_failed
from rllm.engine.request import RolloutRequest
from rllm.engine.validation import check_episode, check_promise, episode_from
from rllm.errors import AgentError, ConfigError
from rllm.rewards.scoring import with_reward
from rllm.sdk import trajectory
from rllm.types import UNSCORED, Episode, Step, TerminationReason, Trajectory, is_scored


def checked(**fields: Any) -> Episode:
    episode = Episode(**fields)
    check_episode(episode, "solve")
    return episode


def test_unambiguous_values_are_converted() -> None:
    step = Step(
        info=None,  # type: ignore[arg-type]
        logprobs=None,  # type: ignore[arg-type]
        prompt_ids=np.array([1, 2]),  # type: ignore[arg-type]
        response_ids=(3,),  # type: ignore[arg-type]
        model_response=None,  # type: ignore[arg-type]
        chat_completions=[ChatCompletionMessage(role="assistant", content="4")],  # type: ignore[list-item]
    )
    episode = checked(
        is_correct=np.bool_(True),
        termination_reason="env_done",
        metrics={"turns": np.float32(2.0)},
        info=None,
        trajectories=[Trajectory(steps=[step], info=None, reward=np.int64(1), trainable=np.bool_(False))],  # type: ignore[arg-type]
    )
    assert episode.is_correct is True
    assert episode.termination_reason is TerminationReason.ENV_DONE
    assert episode.metrics == {"turns": 2.0}
    assert (step.logprobs, step.prompt_ids, step.response_ids, step.model_response) == ([], [1, 2], [3], "")
    assert episode.trajectories[0].trainable is False
    assert (episode.info, episode.trajectories[0].info, step.info) == ({}, {}, {})
    assert step.chat_completions == [{"role": "assistant", "content": "4"}]
    assert type(episode.trajectories[0].reward) is float


def test_error_text_fails_the_rollout() -> None:
    assert why_failed(checked(info={"error": "the browser died"})) == "AgentError: the browser died"
    assert why_failed(checked(info={"error": {"type": "Lost", "message": "no page"}})) == "Lost: no page"
    assert not checked(info={"error": None}).failed
    assert checked(info={"warnings": "slow"}).info["warnings"] == ["slow"]


@pytest.mark.parametrize(
    ("fields", "expected_message"),
    [
        ({"metrics": {"note": "slow"}}, "the metric 'note' 'slow'"),
        ({"metrics": [1.0]}, r"the metrics of its episode \[1.0\]: use a dict"),
        ({"termination_reason": "done"}, "the termination_reason of its episode 'done': use a TerminationReason: MAX_"),
        ({"is_correct": "yes"}, "the is_correct of its episode 'yes': use True or False"),
        ({"info": "slow"}, "the info of its episode 'slow': use a dict"),
        ({"trajectories": [{"reward": 1.0}]}, r"\{'reward': 1.0\} of type dict among the trajectories of its episode"),
        ({"trajectories": [Trajectory(steps=None)]}, "the steps of trajectory 'agent' None: use a list of Step"),  # type: ignore[arg-type]
        (
            {"trajectories": [Trajectory(steps=[{}])]},
            r"\{\} of type dict among the steps of trajectory 'agent': use Step",
        ),  # type: ignore[list-item]
        (
            {"trajectories": [Trajectory(steps=[Step(chat_completions=["4"])])]},  # type: ignore[list-item]
            "the message in chat_completions of a step of trajectory 'agent' '4': use a dict with a role",
        ),
        (
            {"trajectories": [Trajectory(steps=[Step(id=None)])]},
            "the id of a step of trajectory 'agent' None: use a text",
        ),
        (
            {"trajectories": [Trajectory(steps=[Step(chat_completions=[{"role": "assistant", "content": 4}])])]},
            "the content of a message in chat_completions of a step of trajectory 'agent' 4: use a text or a list",
        ),
        (
            {"trajectories": [Trajectory(steps=[Step(model_response=np.array([1, 2]))])]},  # type: ignore[arg-type]
            r"the model_response of a step of trajectory 'agent' array\(\[1, 2\]\): use a text",
        ),
        (
            {"trajectories": [Trajectory(steps=[Step(prompt_ids=5)])]},  # type: ignore[arg-type]
            "the prompt_ids of a step of trajectory 'agent' 5: use a list of numbers",
        ),
        (
            {"trajectories": [Trajectory(trainable=np.array([1, 2]))]},  # type: ignore[arg-type]
            r"the trainable of trajectory 'agent' array\(\[1, 2\]\): use True or False",
        ),
        ({"trajectories": [Trajectory(reward=np.datetime64("2026-01-01"))]}, "the reward on trajectory 'agent' "),  # type: ignore[arg-type]
        (
            {"trajectories": [Trajectory(reward=10**5000)]},
            "the reward on trajectory 'agent' <a number too long to write>",
        ),
    ],
)
def test_invalid_values_are_reported(fields: dict[str, Any], expected_message: str) -> None:
    with pytest.raises(AgentError, match=f"solve returned {expected_message}"):
        checked(**fields)


def test_failed_rollout_keeps_well_formed_trajectories() -> None:
    sound = Trajectory(reward=float("nan"), steps=[Step(reward="much")])  # type: ignore[arg-type]
    odd = [Trajectory(steps=None), Trajectory(uid=[1]), Trajectory(steps=[Step(chat_completions=["4"])])]  # type: ignore[arg-type, list-item]
    attempt = RolloutRequest(task={}, task_id="t", trajectories=[sound, *odd])
    assert failed_episode(attempt, AgentError("no")).trajectories == [sound]


@pytest.mark.parametrize(
    ("returned", "reward", "is_correct"),
    [
        (1, 1.0, True),
        (0.5, 0.5, False),
        (True, 1.0, True),
        (False, 0.0, False),
        (-2, -2.0, False),
        (np.float32(0.25), 0.25, False),
        (np.int64(3), 3.0, True),
        (np.bool_(True), 1.0, True),
        (np.array(1.0), 1.0, True),
    ],
)
def test_number_is_the_reward_of_one_trajectory(returned: Any, reward: float, is_correct: bool) -> None:
    episode = episode_from(returned, "agent")
    (trajectory,) = episode.trajectories
    assert trajectory.name == "agent"
    assert type(trajectory.reward) is float
    assert trajectory.reward == reward
    assert episode.is_correct is is_correct


@pytest.mark.parametrize("returned", [None, UNSCORED, (UNSCORED, {"turns": 2})])
def test_unscored_is_not_zero(returned: Any) -> None:
    episode = episode_from(returned, "agent")
    assert not is_scored(episode.trajectories[0].reward)
    assert not episode.is_correct


def test_reward_may_come_with_metrics() -> None:
    episode = episode_from((np.float64(1.0), {"turns": 3, "ok": True}), "agent")
    assert episode.trajectories[0].reward == 1.0
    assert episode.metrics == {"turns": 3.0, "ok": 1.0}
    assert episode_from((None, {"turns": 1}), "agent").trajectories[0].final_reward() is None


def test_trajectories_keep_their_rewards() -> None:
    solver = Trajectory(name="solver", steps=[Step(reward=np.float32(0.5))])
    judge = Trajectory(name="judge", reward=1)
    episode = episode_from([solver, judge], "agent")
    assert episode.trajectories == [solver, judge]
    assert [item.final_reward() for item in episode.trajectories] == [0.5, 1.0]
    assert type(solver.steps[0].reward) is float
    assert episode.is_correct  # the last trajectory decides
    assert episode_from(
        [*episode.trajectories, Trajectory(name="critic")], "agent"
    ).is_correct  # the last one with a reward decides
    assert not episode_from(solver, "agent").is_correct


def test_episode_is_returned_unchanged() -> None:
    mine = Episode(is_correct=True, metrics={"x": 1.0})
    episode = episode_from(mine, "agent")
    assert episode is mine
    assert len(episode.trajectories) == 1


@pytest.mark.parametrize(
    "returned",
    [
        *({}, [], [1.0], [Trajectory(), 1.0], object(), (1.0, 2.0), np.array([1.0, 2.0])),
        *(1j, np.complex128(1j), np.datetime64("2026-01-01"), np.array(None), np.bytes_(b"1")),
    ],
)
def test_other_values_are_rejected_with_the_list_of_accepted_ones(returned: Any) -> None:
    with pytest.raises(AgentError, match=f"my_agent returned .* of type {type(returned).__name__}: return a number, "):
        episode_from(returned, "my_agent")


def test_named_parts_are_summed_and_the_first_decides_correctness() -> None:
    episode = episode_from({"right": 0, "short": 1.5}, "my_agent")
    assert (episode.trajectories[0].reward, episode.trajectories[0].reward_parts) == (1.5, {"right": 0.0, "short": 1.5})
    assert episode.is_correct is False
    with pytest.raises(AgentError, match="my_agent, of the part 'short', returned 'yes'"):
        episode_from({"right": 1, "short": "yes"}, "my_agent")


@pytest.mark.parametrize(
    "returned", [math.nan, math.inf, np.float32("nan"), Trajectory(reward=math.nan), (1.0, {"x": math.inf})]
)
def test_numbers_must_be_finite(returned: Any) -> None:
    with pytest.raises(AgentError, match="use a finite number"):
        episode_from(returned, "agent")


def test_step_reward_of_the_wrong_type_is_reported() -> None:
    with pytest.raises(AgentError, match="reward on trajectory 'solver'"):
        episode_from(Trajectory(name="solver", steps=[Step(reward="1")]), "agent")  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [10**400, float("inf"), float("nan")])
def test_non_finite_reward_is_an_agent_error(reward: float) -> None:
    with pytest.raises(AgentError, match="use a finite number"):
        episode_from(reward, "agent")


@pytest.mark.parametrize("reward", [1e308, -1e31])
def test_oversized_reward_error_names_the_limits(reward: float) -> None:
    with pytest.raises(AgentError, match=re.escape(f"the reward {reward!r}: use a number from -1e+30 to 1e+30")):
        episode_from(reward, "agent")


HOW = "has no score: name the function that judges it .--reward FILE.py:function, .* or return the reward itself"


def test_text_is_not_a_reward() -> None:
    with pytest.raises(AgentError, match=f"my_agent returned '4', which {HOW}"):
        episode_from("4", "my_agent")


def text_agent(question: str) -> str:
    return question


async def async_text_agent(question: str) -> str:
    return question


async_text_agent.__annotations__["return"] = str  # as without postponed annotations


@pytest.mark.parametrize("function", [text_agent, async_text_agent])
def test_function_annotated_to_return_text_is_rejected_before_it_runs(function: Any) -> None:
    with pytest.raises(ConfigError, match=f"my_agent returns text .-> str., which {HOW}"):
        check_promise(function, "my_agent")


def test_decorated_function_that_returns_text_is_accepted() -> None:
    for function in (
        with_reward(text_agent, lambda task, answer: 1.0),
        trajectory(text_agent),
        lambda question: "4",
        print,
    ):
        check_promise(function, "my_agent")
