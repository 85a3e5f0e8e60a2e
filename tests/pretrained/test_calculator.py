"""A pretrained model that calls a calculator through plain text, since its chat template has no tools."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from rllm.store import open_store
from rllm.types import DRIFT_KEY

from .sums import train

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]
SYSTEM = (
    "You have a calculator. To use it, write calc(...) around a sum, such as calc(7 + 8), and stop. "
    "You are then told the result."
)
SHOWN = (("31 - 5", "26"), ("4 + 9 - 2", "11"))
CALL = re.compile(r"calc\(([0-9 +-]+)\)")


def calculate(question: str, answer: int, base_url: str) -> float:
    """Answer a sum with the calculator; the reward is 1.0 if the last number is right."""
    with OpenAI(base_url=base_url, api_key="any", timeout=600) as client:
        messages = conversation(question.rpartition(": ")[2].removesuffix(" ="))
        text = ""
        for _ in range(3):
            response = client.chat.completions.create(model="policy", messages=messages, max_tokens=32)
            text = response.choices[0].message.content or ""
            if not (call := CALL.search(text)):
                break
            result = str(sum(int(term) for term in re.findall(r"[+-]?\d+", call[1].replace(" ", ""))))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    return float(re.findall(r"-?\d+", text)[-1:] == [str(answer)])


def conversation(problem: str) -> list[Any]:
    """Return the messages before the first answer: how to use the calculator, two examples, and the problem."""
    messages = [{"role": "system", "content": SYSTEM}]
    for sum_of_it, result in SHOWN:
        turns = [f"What is {sum_of_it}?", f"calc({sum_of_it})", result, f"The answer is {result}."]
        messages += [
            {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, turns, strict=True)
        ]
    return [*messages, {"role": "user", "content": f"What is {problem}?"}]


def test_model_learns_to_calculate_and_its_turns_are_exact(smollm: Path, tmp_path: Path) -> None:
    lines = train(smollm, tmp_path / "run", "num_steps=4", agent_run_func=calculate)
    steps = [line for line in lines if "policy/loss" in line]
    rewards = [line["rollout/reward"] for line in steps]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards
    assert sum(line["tokens/drift"] for line in steps) == 0
    assert sum(line["rollout/num_failed"] for line in steps) == 0
    num_continued = 0
    with open_store(str(tmp_path / "run" / "traces.db"), read_only=True) as store:
        for session in store.sessions(limit=64, oldest_first=True):
            for one, other in pairwise(store.by_session(session.id)):
                known = [*one.prompt_ids, *one.response_ids]
                assert other.prompt_ids[: len(known)] == known
                assert DRIFT_KEY not in other.metadata
                num_continued += 1
    assert num_continued > 16, "the calculator was called"
