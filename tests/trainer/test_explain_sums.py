"""The sums of `rllm explain` over all episodes equal the input of the optimizer, for runs of any kind."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rllm.store import open_store
from rllm.types import Episode, Step, TerminationReason, Trajectory
from rllm.viewer.batches import advantages_in
from rllm.viewer.explain import ExplainedStep, explain

from .conftest import RunTrainer

SEEN: Counter[str] = Counter()


def call(base_url: str, messages: list[dict[str, str]], **options: Any) -> tuple[str, str]:
    """Return the id of the answer, and its text."""
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["id"], answer["choices"][0]["message"]["content"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def luck(word: str) -> float:
    """Return 1, 0, 1, ... for a word."""
    SEEN[word] += 1
    return float(SEEN[word] % 2)


def conversation(word: str, base_url: str, turns: int = 3) -> Trajectory:
    """Take several turns with their own rewards."""
    messages, steps, won = [user(word)], [], luck(word)
    for turn in range(turns):
        step_id, text = call(base_url, messages)
        messages += [{"role": "assistant", "content": text}, user(f"{turn}?")]
        steps.append(Step(id=step_id, reward=won * turn))
    return Trajectory(steps=steps)


def edited(word: str, base_url: str) -> Trajectory:
    """Drop the history, so that the steps are separate sequences."""
    won = luck(word)
    return Trajectory(steps=[Step(id=call(base_url, [user(f"{word} {turn}")])[0]) for turn in range(2)], reward=won)


def roles(word: str, base_url: str) -> list[Trajectory]:
    won = luck(word)
    solver, judge = (call(base_url, [user(f"{name} {word}")])[0] for name in ("solve", "judge"))
    return [
        Trajectory(name="solver", steps=[Step(id=solver)], reward=won),
        Trajectory(name="judge", steps=[Step(id=judge)], reward=1.0 - 0.5 * won),
    ]


def shared(word: str, base_url: str) -> list[Trajectory]:
    """Return trajectories of one plan, some with the same name, and some not trained."""
    won = luck(word)
    plan, *others = (Step(id=call(base_url, [user(f"{name} {word}")])[0]) for name in ("plan", "solve", "doubt"))
    return [
        Trajectory(name="solver", steps=[plan, others[0]], reward=won),
        Trajectory(name="solver", steps=[plan, others[1]], reward=0.5 * won),
        Trajectory(name="critic", steps=[plan], reward=1.0),
        Trajectory(name="judge", steps=[plan], reward=won, trainable=False),
    ]


def often_cut(word: str, base_url: str) -> Episode:
    won = luck(word)
    call(base_url, [user(word)], **({"max_tokens": 1} if SEEN[word] % 3 == 0 else {}))
    ended = TerminationReason.MAX_TURNS_EXCEEDED if SEEN[word] % 4 == 0 else TerminationReason.ENV_DONE
    return Episode(trajectories=[Trajectory(reward=won)], termination_reason=ended)


def mostly_equal(word: str, base_url: str) -> float:
    call(base_url, [user(word)])
    return luck(word) if word in ("fig", "kiwi") else 1.0


def failing(word: str, base_url: str) -> float | None:
    call(base_url, [user(word)])
    won = luck(word)
    if SEEN[word] % 5 == 0:
        raise ValueError("no idea")
    return None if SEEN[word] % 7 == 0 else won


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "turns": (conversation, {}),
    "steps": (conversation, {"algorithm": {"name": "grpo", "level": "step", "gamma": 0.5}}),
    "edited": (edited, {}),
    "edited steps": (edited, {"algorithm": {"name": "rloo", "level": "step"}}),
    "roles": (roles, {"roles": {"judge": {"weight": 0.5}}}),
    "a shared call": (shared, {}),
    "a frozen role": (roles, {"roles": {"judge": {"trainable": False}}}),
    "filters": (often_cut, {"filters": {"truncated": True, "ended_by": ["max_turns_exceeded"]}}),
    "resampling": (mostly_equal, {"rollout": {"resample_rounds": 2}}),
    "failures": (failing, {}),
    "a critic": (conversation, {"algorithm": {"name": "ppo"}}),
    "a critic of edited steps": (edited, {"algorithm": {"name": "ppo", "gae_lambda": 0.5}}),
    "single tokens": (conversation, {"algorithm": {"name": "reinforce_plus_plus"}}),
    "a baseline of the batch": (edited, {"algorithm": {"name": "reinforce_plus_plus_baseline"}}),
    "a greedy rollout": (edited, {"algorithm": {"name": "remax"}}),
    "a reference": (mostly_equal, {"algorithm": {"name": "grpo", "kl_coef": 0.1}}),
    "a reference in the reward": (edited, {"algorithm": {"name": "grpo", "kl_coef": 0.1, "kl_in": "reward"}}),
    "rollouts ahead": (edited, {"rollout": {"max_staleness": 1}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sums_equal_those_of_the_batches(run_trainer: RunTrainer, case: str) -> None:
    agent, changes = CASES[case]
    SEEN.clear()
    rollout = {"group_size": 4, "max_concurrent": 1, **changes.get("rollout", {})}
    run = run_trainer({**changes, "num_steps": 2, "tasks_per_step": 2, "rollout": rollout}, agent=agent)
    steps = explained(run.trainer.run_dir)
    for number, batch in enumerate(run.backend.batches):
        own = [step for step in steps if step.training_step == number]
        assert sum(step.num_trained_tokens for step in own) == batch.num_tokens > 0
        assert sum(step.advantage_sum for step in own) == pytest.approx(float(batch.advantages.sum()), abs=1e-4)
        in_batch = sorted(zip(batch.ids.tolist(), batch.advantages.tolist(), strict=True))
        tokens = [token for step in own for token in step.tokens if token.trainer_logprob]
        assert sorted((token.token_id, token.advantage) for token in tokens) == in_batch
        for step in own:
            if step.num_trained_tokens:
                assert fmean(token.advantage or 0.0 for token in step.tokens) == pytest.approx(step.advantage, abs=1e-6)
        assert dropped(own) == dropped_in(run.lines, number + 1)


def test_every_drop_reason_is_counted_and_stored_with_its_call(run_trainer: RunTrainer) -> None:
    def mixed(word: str, base_url: str) -> Any:
        SEEN[word] += 1
        call(base_url, [user(word)], **({"max_tokens": 1} if SEEN[word] == 1 else {}))
        match SEEN[word]:
            case 2:
                return Episode(trajectories=[Trajectory(reward=1.0)], termination_reason=TerminationReason.UNKNOWN)
            case 3:
                time.sleep(4)
            case 4:
                raise ValueError("no idea")
            case 5:
                return None
            case 6:
                return Trajectory(reward=1.0, trainable=False)
        return Trajectory(name="alone", reward=1.0) if SEEN[word] == 7 else float(SEEN[word] % 2)

    SEEN.clear()
    rollout = {"group_size": 9, "max_concurrent": 1, "timeout_s": 3.0, "num_retries": 0}
    filters = {"truncated": True, "ended_by": ["unknown"]}
    config = {"num_steps": 1, "tasks_per_step": 1, "rollout": rollout, "filters": filters}
    run = run_trainer(config, agent=mixed)
    found = {name: value for name, value in run.lines[-1].items() if name.startswith("dropped/")}
    reasons = ("truncated", "unknown", "timeout", "error", "unscored", "not_trainable", "too_few_siblings")
    assert found == {f"dropped/{reason}": 1.0 for reason in reasons}
    steps = explained(run.trainer.run_dir)
    assert Counter(step.dropped for step in steps) == {**dict.fromkeys(reasons, 1), None: 2}
    assert {step.training_step for step in steps} == {0}


def explained(run_dir: Path) -> list[ExplainedStep]:
    with open_store(str(run_dir / "traces.db"), read_only=True) as store:
        sessions, fed = store.sessions(limit=1000), advantages_in(run_dir)
        return [step for session in sessions for step in explain(store, session.id, fed=fed).steps]


def dropped(steps: list[ExplainedStep]) -> set[str]:
    return {step.dropped for step in steps if step.dropped is not None}


def dropped_in(lines: list[Mapping[str, Any]], step: int) -> set[str]:
    return {
        name.removeprefix("dropped/")
        for line in lines
        if line["step"] == step
        for name in line
        if name.startswith("dropped/")
    }
