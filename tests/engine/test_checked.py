from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from rllm.engine.checked import check_episode
from rllm.engine.failures import why_failed
from rllm.engine.runner import Attempt, failed_episode
from rllm.errors import AgentError
from rllm.types import Episode, Step, TerminationReason, Trajectory


def checked(**fields: Any) -> Episode:
    episode = Episode(**fields)
    check_episode(episode, "solve")
    return episode


def test_what_can_be_meant_in_one_way_only_is_put_right() -> None:
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


def test_an_error_that_is_only_a_text_fails_the_rollout_with_it() -> None:
    assert why_failed(checked(info={"error": "the browser died"})) == "AgentError: the browser died"
    assert why_failed(checked(info={"error": {"type": "Lost", "message": "no page"}})) == "Lost: no page"
    assert not checked(info={"error": None}).failed
    assert checked(info={"warnings": "slow"}).info["warnings"] == ["slow"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"metrics": {"note": "slow"}}, "the metric 'note' 'slow': use a finite number; what is none belongs in"),
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
def test_what_cannot_be_understood_is_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(AgentError, match=f"solve returned {told}"):
        checked(**fields)


def test_a_failed_rollout_keeps_what_has_the_form_of_a_trajectory_whatever_it_earned() -> None:
    sound = Trajectory(reward=float("nan"), steps=[Step(reward="much")])  # type: ignore[arg-type]
    odd = [Trajectory(steps=None), Trajectory(uid=[1]), Trajectory(steps=[Step(chat_completions=["4"])])]  # type: ignore[arg-type, list-item]
    attempt = Attempt(task={}, task_id="t", trajectories=[sound, *odd])
    assert failed_episode(attempt, AgentError("no")).trajectories == [sound]
