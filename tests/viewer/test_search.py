"""Filters of rollouts."""

from __future__ import annotations

import pytest

from rllm.errors import ConfigError
from rllm.store.base import SessionInfo
from rllm.types import OUTCOME_KEY
from rllm.viewer.rollouts import Query, StoredRollout, contains_text, rollout_of, search

from .run_folders import outcome_of, trace_of


def made(number: int, **fields) -> StoredRollout:
    about = {"task_id": f"row {number}", "index": 0, "split": "train", "training_step": number}
    outcome = outcome_of(trace_of(f"s{number}"), **fields)
    return rollout_of(
        SessionInfo(id=f"s{number}", created_at=float(number), num_traces=1, metadata={**about, OUTCOME_KEY: outcome})
    )


def calling(tool: str) -> dict:
    return {"trajectories": [{**outcome_of(trace_of("x"))["trajectories"][0], "tools": [tool]}]}


ROLLOUTS = [
    made(0, reward=0.0),
    made(1, reward=0.5, name="judge"),
    made(2, reward=1.0, error={"type": "AgentError", "message": "no figs"}),
    made(3, **calling("look_up")),
]


def found(**given: str) -> list[str]:
    return [item.session_id for item in search(ROLLOUTS, Query.of(given), lambda _: []).rollouts]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["s3", "s2", "s1", "s0"]),
        ({"reward": "0"}, ["s0"]),
        ({"reward": ">0.4", "sort": "reward"}, ["s2", "s3", "s1"]),
        ({"reward": "0.25..0.75"}, ["s1"]),
        ({"reward": "none"}, []),
        ({"role": "judge"}, ["s1"]),
        ({"error": "any"}, ["s2"]),
        ({"error": "NO FIGS"}, ["s2"]),
        ({"tool": "look"}, ["s3"]),
        ({"badge": "failed"}, ["s2"]),
        ({"step": "1"}, ["s0"]),
        ({"task": "row 3"}, ["s3"]),
        ({"reward": "1", "error": "any", "step": "3"}, ["s2"]),
        ({"sort": "lowest reward"}, ["s0", "s1", "s2", "s3"]),
    ],
)
def test_filters_find_matching_episodes(given: dict[str, str], expected: list[str]) -> None:
    assert found(**given) == expected


@pytest.mark.parametrize("given", [{"reward": "much"}, {"step": "first"}, {"sort": "beauty"}])
def test_invalid_filters_are_rejected(given: dict[str, str]) -> None:
    [value] = given.values()
    with pytest.raises(ConfigError, match=value):
        Query.of(given)


def test_text_is_searched_one_page_at_a_time() -> None:
    texts = {
        f"s{number}": [trace_of(f"s{number}", response={"role": "assistant", "content": f"{number} FIGS"})]
        for number in (0, 2)
    }
    first = search(ROLLOUTS, Query.of({"text": "figs"}), lambda name: texts.get(name, []), limit=1)
    assert ([item.session_id for item in first.rollouts], first.next_offset, first.total) == (["s2"], 2, None)
    second = search(ROLLOUTS, Query.of({"text": "figs"}), lambda name: texts.get(name, []), limit=1, offset=2)
    assert ([item.session_id for item in second.rollouts], second.next_offset) == (["s0"], None)


def test_text_is_found_in_tool_calls() -> None:
    call = {"function": {"name": "price", "arguments": '{"item": "kiwi"}'}}
    trace = trace_of("s", response={"role": "assistant", "content": None, "tool_calls": [call]})
    assert contains_text("KIWI", [trace])
    assert contains_text("price", [trace])
    assert not contains_text("plum", [trace])
