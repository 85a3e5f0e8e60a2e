from typing import Any

import pytest

from rllm.engine.failures import Reason, count_reasons, why_failed, why_unscored
from rllm.types import Episode, Trajectory


def failed(message: str, session_id: str = "") -> Episode:
    return Episode(
        session_id=session_id, info={"error": {"type": "AgentError", "message": message, "traceback": "..."}}
    )


def test_messages_that_differ_only_in_ids_and_numbers_are_one_reason():
    messages = [
        "AgentError: row 17 has no answer after 0.25 s",
        "AgentError: row 8 has no answer after 1e-3 s",
        "RolloutTimeout: rollout 5:1 did not finish",
        "AgentError: row 17 has no answer after 0.25 s",
    ]
    assert count_reasons(messages) == [
        Reason(text="AgentError: row 17 has no answer after 0.25 s", count=3, num_variants=2),
        Reason(text="RolloutTimeout: rollout 5:1 did not finish", count=1),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("<Env object at 0x7f00ab>", "<Env object at 0xdead>"),
        ("call chatcmpl-0a1b2c3d4e is not there", "call chatcmpl-ffee00112 is not there"),
        ("no 123e4567-e89b-12d3-a456-426614174000", "no 9b2e4567-e89b-12d3-a456-4266141740ff"),
        ("cannot reach 127.0.0.1:8000", "cannot reach 10.0.0.12:91"),
        ("f returned 'four figs', which", "f returned 'limes', which"),
    ],
)
def test_varying_values_are_grouped_under_one_reason(one, other):
    [reason] = count_reasons([one, other])
    assert str(reason) == f"2 x {one} (and 1 that differ only in ids, numbers or returned text)"


@pytest.mark.parametrize(("one", "other"), [("no figs", "no limes"), ("a decade", "a defaced"), ("x", "x 1")])
def test_different_words_are_different_reasons(one, other):
    assert [str(reason) for reason in count_reasons([one, other])] == [f"1 x {one}", f"1 x {other}"]


def test_failure_is_described_without_its_session():
    assert why_failed(failed("no call in s-1", session_id="s-1")) == "AgentError: no call in ..."
    assert why_unscored(failed("no")) is None
    assert why_failed(Episode()) is None


@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (Episode(trajectories=[Trajectory()]), "it has no reward"),
        (Episode(info={"unscored": "no reward was returned for 'agent'"}), "no reward was returned for 'agent'"),
        (Episode(trajectories=[Trajectory(), Trajectory(reward=0.0)]), None),
        (Episode(is_correct=True), None),
    ],
)
def test_rollout_without_reward_is_unscored(episode: Episode, reason: Any):
    assert why_unscored(episode) == reason
