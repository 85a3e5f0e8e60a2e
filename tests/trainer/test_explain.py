from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.store import open_store
from rllm.store.base import TraceStore
from rllm.store.memory import MemoryTraceStore
from rllm.trainer.config import TrainConfig
from rllm.trainer.episode_records import outcome_of
from rllm.types import OUTCOME_KEY, Episode, Trace, Trajectory, text_of
from rllm.viewer.batches import advantages_in
from rllm.viewer.explain import explain, latest_episodes

from .conftest import Run, RunTrainer, ScriptedBackend, ask


@pytest.fixture
def run(run_trainer: RunTrainer) -> Run:
    return run_trainer({"num_steps": 1, "tasks_per_step": 2, "rollout": {"group_size": 3}}, val=True)


@pytest.fixture
def store(run: Run) -> TraceStore:
    return open_store(str(Path(run.trainer.run_dir) / "traces.db"), read_only=True)


def names(store: TraceStore, split: str) -> list[str]:
    sessions = [session.metadata for session in store.sessions()]
    return [f"{metadata['task_id']}:{metadata['index']}" for metadata in sessions if metadata["split"] == split]


def test_sums_over_episodes_equal_those_of_the_batch(run: Run, store: TraceStore) -> None:
    (batch,) = run.backend.batches
    explained = [explain(store, name) for name in names(store, "train")]
    steps = [step for episode in explained for step in episode.steps]
    assert len(explained) == 6
    assert sum(step.num_trained_tokens for step in steps) == batch.num_tokens > 0
    assert sum(step.advantage_sum for step in steps) == pytest.approx(batch.advantages.sum().item(), abs=1e-5)
    tokens = sorted(token.token_id for step in steps for token in step.tokens if token.trainer_logprob is not None)
    assert tokens == sorted(batch.ids.tolist())
    for step in steps:
        assert step.group_id is not None
        assert step.baseline == pytest.approx(2 / 3)
        # The scripted backend's log-probabilities are half a nat below its sampler's.
        assert all(token.trainer_logprob == pytest.approx(token.sampler_logprob - 0.5) for token in step.tokens)
    store.close()


def test_tokens_without_batch_have_the_mean_of_their_step(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 1, "keep_batches": 0, "algorithm": {"name": "reinforce_plus_plus", "gamma": 0.5}})
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        (step,) = explain(store, names(store, "train")[0], fed=advantages_in(run.trainer.run_dir)).steps
    assert step.advantage is not None
    assert {token.advantage for token in step.tokens} == {step.advantage}


def test_every_token_has_its_weight_version() -> None:
    trace = Trace(
        id="a",
        call_id="a",
        session_id="s",
        model="policy",
        messages=[],
        response={},
        prompt_ids=[1],
        response_ids=[2, 3, 4],
        logprobs=[-1.0] * 3,
        weight_version=5,
        weight_updates=[[1, 6], [2, 8]],
    )
    store = MemoryTraceStore()
    store.open_session("s", {"task_id": "t", "index": 0}).result()
    store.add([trace]).result()
    (step,) = explain(store, "t:0").steps
    assert [token.weight_version for token in step.tokens] == [5, 6, 8]


def test_step_selects_one_of_several_evaluations(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 1}, val=True)
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        newest, first = (explain(store, "0:0", step=step) for step in (1, 0))
        assert [(one.split, one.step) for one in (newest, first)] == [("eval", 1), ("eval", 0)]
        assert newest.session_id != first.session_id
        assert explain(store, "0:0") == newest
        with pytest.raises(ConfigError, match=r"episode='0:0', split=eval, step=7 is not in the store"):
            explain(store, "0:0", split="eval", step=7)


def test_evaluation_trains_no_tokens(run: Run, store: TraceStore) -> None:
    episode = explain(store, names(store, "eval")[0])
    (step,) = episode.steps
    assert (episode.split, step.training_step, step.num_trained_tokens, step.advantage_sum) == ("eval", None, 0, 0.0)
    store.close()


def test_session_id_selects_its_episode(run: Run, store: TraceStore) -> None:
    name = names(store, "train")[0]
    found = explain(store, name)
    assert explain(store, found.session_id) == found
    with pytest.raises(ConfigError, match=r"episode='nothing:9' is not in the store; the newest are \w+"):
        explain(store, "nothing:9")
    store.close()


def test_reward_of_a_role_is_the_mean_of_its_trajectories() -> None:
    paths = [("solver", 1.0), ("solver", 0.0), ("solver", None), ("judge", None)]
    with MemoryTraceStore() as store:
        episode = Episode(
            task_id="t", session_id="s", trajectories=[Trajectory(name=name, reward=reward) for name, reward in paths]
        )
        about = {"task_id": "t", "index": 0, OUTCOME_KEY: outcome_of(episode, {})}
        store.open_session("s", about).result()
        (listed,) = latest_episodes(store, limit=1)
        assert listed.rewards == explain(store, "t:0").rewards == {"solver": 0.5, "judge": None}


SUMMARY = "The parser was read, and it fails on quoted fields, for which there is a test now."
TITLE = "Mending a parser"


_rewards = itertools.count()


class SummarizingBackend(ScriptedBackend):
    """Backend whose model writes summaries and titles, and otherwise repeats the last message."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        answers = {"Summarize:": SUMMARY, "Title": TITLE}
        self.inference._script = lambda messages: answers.get(messages[0]["content"].split()[0], "I will")


def compacting(word: str, base_url: str) -> float:
    """Ask for a title, work, replace the history by its summary, and work on."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ask(base_url, f"Title for {word}")
    ask(base_url, word, tools=tools)
    summary = ask(base_url, f"Summarize: {word}")
    ask(base_url, f"This session is being continued.\nSummary:\n{summary}", tools=tools)
    return float(next(_rewards) % 2)


def test_summary_is_trained_on_and_a_title_is_a_side_call(
    run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"num_steps": 2, "tasks_per_step": 1, "rollout": {"group_size": 2}}
    run = run_trainer({**small, "backend": f"{__name__}:SummarizingBackend"}, agent=compacting)
    assert [line["dropped/side_call"] for line in run.lines if "dropped/side_call" in line] == [2, 2]
    (named,) = [record.getMessage() for record in caplog.records if "rollout.side_calls" in record.getMessage()]
    assert "without tools, asked 'Title for " in named
    assert repr(TITLE) in named
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        episodes = [explain(store, name) for name in names(store, "train")]
    for episode in episodes:
        answers = {text_of(step.answer): step for step in episode.steps}
        advantages = {step.advantage for text, step in answers.items() if text != TITLE}
        assert len(advantages) == 1, "that of the rollout"
        assert answers[SUMMARY].num_trained_tokens == len(answers[SUMMARY].tokens) > 0
        assert (answers[TITLE].side_call, answers[TITLE].num_trained_tokens) == ("without tools", 0)
        assert answers[SUMMARY].side_call is None
    spans = [[span.step_id for span in sequence.spans] for batch in run.backend.batches for sequence in batch.sequences]
    summaries = [step.trace_id for episode in episodes for step in episode.steps if text_of(step.answer) == SUMMARY]
    assert sorted(ids for ids in spans if set(ids) & set(summaries)) == sorted([trace_id] for trace_id in summaries)
