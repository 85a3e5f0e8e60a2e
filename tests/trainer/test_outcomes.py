"""Outcome stored with the traces of each rollout, so that a run can be browsed without reading them."""

from __future__ import annotations

import pytest

from rllm.errors import RolloutError
from rllm.store import open_store
from rllm.trainer.episode_records import outcome_of
from rllm.types import OUTCOME_KEY, Episode, Step, Trajectory

from .conftest import RunTrainer, ask


def outcomes_of(run):
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        found = [(info, store.by_session(info.id)) for info in store.sessions()]
    return [(info.metadata, info.metadata[OUTCOME_KEY], traces) for info, traces in found]


def test_every_rollout_has_an_outcome(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 1}, val=True)
    found = outcomes_of(run)
    assert [metadata["split"] for metadata, _, _ in found].count("eval") == 4
    trained = [(outcome, traces) for metadata, outcome, traces in found if metadata["split"] == "train"]
    assert len(trained) == 6
    for outcome, [trace] in trained:
        (path,) = outcome["trajectories"]
        advantage = path["advantage"]
        assert path["reward"] in (0.0, 1.0)
        assert advantage * (path["reward"] - 0.5) > 0
        assert path["steps"] == [{"id": trace.id, "advantage": pytest.approx(advantage)}]
        assert (path["num_tokens"], path["dropped"], path["tools"]) == (len(trace.response_ids), None, [])
        assert (outcome["error"], outcome["metrics"]["timing/rollout_s"] > 0) == (None, True)


def test_failed_and_untrained_rollouts_have_a_reason(run_trainer: RunTrainer) -> None:
    def fails_for_figs(word: str, base_url: str) -> float:
        ask(base_url, word)
        if word == "fig":
            raise ValueError("no figs today")
        return 1.0

    run = run_trainer({"num_steps": 1, "tasks_per_step": 4}, agent=fails_for_figs)
    by_word = {traces[0].messages[0]["content"]: outcome for _, outcome, traces in outcomes_of(run)}
    assert by_word["fig"]["error"]["type"] == "AgentError"
    assert "no figs today" in by_word["fig"]["error"]["message"]
    assert by_word["kiwi"]["trajectories"][0]["dropped"] == "zero_variance"


def test_run_with_only_failed_rollouts_lists_the_reasons(run_trainer: RunTrainer) -> None:
    def broken(word: str, base_url: str) -> float:
        ask(base_url, word)
        raise ValueError("no fruit today")

    run = run_trainer({"num_steps": 1}, agent=broken, raises=RolloutError)
    found = outcomes_of(run)
    assert len(found) == 6
    assert all("no fruit today" in outcome["error"]["message"] for _, outcome, _ in found)


@pytest.mark.parametrize("reward", ["good", float("nan"), float("inf")])
def test_non_finite_reward_is_stored_as_none(reward: object) -> None:
    step = Step(id="a", reward=reward)  # type: ignore[arg-type]
    found = outcome_of(Episode(trajectories=[Trajectory(name="solver", steps=[step])]), {})
    (path,) = found["trajectories"]
    assert (path["reward"], path["steps"]) == (None, [{"id": "a"}])


def test_tool_call_in_another_format_is_ignored() -> None:
    answer = {"role": "assistant", "tool_calls": ["count", {"function": {"name": "search"}}]}
    found = outcome_of(Episode(trajectories=[Trajectory(steps=[Step(chat_completions=[answer])])]), {})
    assert found["trajectories"][0]["tools"] == ["search"]
