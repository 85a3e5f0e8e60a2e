"""Rejection sampling: the best rollouts, token for token."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rllm.errors import ConfigError
from rllm.store import open_store
from rllm.store.codec import readable_json
from rllm.trainer.agent_sft_trainer import AgentSFTTrainer
from rllm.trainer.sampled_rows import process_trajectories, rows_of_items, rows_of_store, sampled_from
from rllm.types import NOT_TEXT_KEY, OUTCOME_KEY, Episode, Step, StepCredit, Trace, Trajectory

from .conftest import RunTrainer, ask

QUESTION, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


def trajectory(reward: float | None, *, task: str = "a", ids: tuple[int, ...] = (7, 8), **fields: Any) -> Trajectory:
    steps = [
        Step(prompt_ids=[1, 2], response_ids=list(ids), logprobs=[-1.0] * len(ids), chat_completions=[QUESTION, ANSWER])
    ]
    return Trajectory(reward=reward, task={"question": task}, steps=steps, **fields)


def test_sufficient_reward_keeps_the_sampled_tokens() -> None:
    rows = process_trajectories([trajectory(1.0, ids=(7, 9)), trajectory(0.5), trajectory(0.4), trajectory(None)], 0.5)
    assert [row["reward"] for row in rows] == [1.0, 0.5]
    assert rows[0]["steps"] == [{"prompt_ids": [1, 2], "response_ids": [7, 9]}]
    assert rows[0]["messages"] == [QUESTION, ANSWER]
    assert json.loads(json.dumps(rows)) == rows
    assert AgentSFTTrainer.process_trajectories is process_trajectories


def test_untrainable_trajectories_are_left_out() -> None:
    assert process_trajectories([trajectory(1.0, trainable=False)], 0.0) == []
    assert rows_of_items([Episode(id="a:0", trajectories=[trajectory(1.0)], info={"error": {}})]) == []


def test_trajectories_with_images_are_rejected() -> None:
    shown = trajectory(1.0)
    shown.steps[0].info[NOT_TEXT_KEY] = ["image_url"]
    with pytest.raises(ConfigError, match=r"trajectory 'agent' has messages with parts of type image_url"):
        process_trajectories([shown], 0.5)


def test_conversation_without_ids_is_rendered_later() -> None:
    (row,) = process_trajectories([trajectory(1.0, ids=())], 0.5)
    assert "steps" not in row
    assert row["messages"] == [QUESTION, ANSWER]
    edited = Trajectory(
        reward=1.0, steps=[Step(chat_completions=[QUESTION, ANSWER]), Step(chat_completions=[ANSWER, QUESTION])]
    )
    with pytest.raises(ConfigError, match=r"'agent' has no token ids, and its steps do not extend each other"):
        process_trajectories([edited], 0.5)


def test_rows_come_from_messages_trajectories_and_episodes() -> None:
    episode = Episode(id="t@3.0.1:2", trajectories=[trajectory(1.0, name="solver"), trajectory(0.0, trainable=False)])
    rows = rows_of_items([{"messages": [QUESTION, ANSWER]}, trajectory(0.5), episode, episode.to_dict()])
    assert [row.get("reward") for row in rows] == [None, 0.5, 1.0, 1.0]
    assert rows[2] == rows[3]
    assert (rows[2]["task_id"], rows[2]["name"]) == ("t", "solver"), "the same task at any step of a run"
    with pytest.raises(ConfigError, match=r"row 0 is 7: use an object with messages, a Trajectory or an Episode"):
        rows_of_items([7])
    with pytest.raises(ConfigError, match="row 0 has trajectories but is not an episode"):
        rows_of_items([{"trajectories": [], "colour": "blue"}])


def test_trajectory_in_a_file_equals_one_in_memory() -> None:
    spoken = Trajectory(steps=[Step(chat_completions=[QUESTION, ANSWER], reward=0.5)])
    found = [trajectory(0.25), spoken, trajectory(1.0, trainable=False)]
    in_file = [json.loads(readable_json(item.to_dict())) for item in found]
    assert rows_of_items(in_file) == rows_of_items(found)
    assert [row["reward"] for row in rows_of_items(found)] == [0.25, 0.5]
    with pytest.raises(ConfigError, match="row 0 is not a trajectory"):
        rows_of_items([{**in_file[0], "colour": "blue"}])


def test_best_trajectories_of_each_task_are_selected() -> None:
    rewards = [("a", 0.1), ("b", 0.3), ("a", 0.9), ("a", 0.9), ("b", 0.2), ("c", 0.0)]
    rows = rows_of_items(trajectory(reward, task=task, ids=(number,)) for number, (task, reward) in enumerate(rewards))

    def taken(**options: Any) -> list[int]:
        chosen = sampled_from(rows, **{"reward_threshold": None, "best_per_task": None, **options})
        return [row["steps"][0]["response_ids"][0] for row in chosen]

    assert taken() == [0, 1, 2, 3, 4, 5]
    assert taken(best_per_task=1) == [1, 2, 5]
    assert taken(best_per_task=2) == [1, 2, 3, 4, 5]
    assert taken(reward_threshold=0.2) == [1, 2, 3, 4]
    assert taken(reward_threshold=0.25, best_per_task=1) == [1, 2]
    with pytest.raises(ConfigError, match=r"sft\.reward_threshold=1\.0 leaves nothing of 6 trajectories.*0\.9"):
        taken(reward_threshold=1.0)
    with pytest.raises(ConfigError, match=r"sft\.best_per_task needs rewards"):
        sampled_from([{"messages": []}], reward_threshold=None, best_per_task=1)


def test_rows_without_task_are_separate_tasks() -> None:
    rows = [{"reward": 0.5, "task_id": None}, {"reward": 1.0, "task_id": None}, {"reward": 0.25}]
    assert sampled_from(rows, reward_threshold=None, best_per_task=1) == rows


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_invalid_reward_is_reported_with_its_row(threshold: float | None) -> None:
    with pytest.raises(ConfigError, match="row 1: reward='high': use a number, or leave it out"):
        sampled_from([{"reward": None}, {"reward": "high"}], reward_threshold=threshold, best_per_task=None)


def test_store_yields_the_trained_trajectories_of_its_run() -> None:
    store = open_store("memory:")

    def roll_out(session: str, task_id: str, split: str, *credited: tuple[str, str | None, float | None]) -> None:
        store.open_session(session, {"task_id": task_id, "index": 0, "split": split}).result()
        for place, (role, dropped, reward) in enumerate(credited):
            trace = Trace(
                id=f"{session}-{place}", call_id=f"{session}-{place}", session_id=session, model="m", messages=[QUESTION],
                response=ANSWER, prompt_ids=[1] * (place + 1), response_ids=[5, place], logprobs=[-1.0, -1.0],
            )  # fmt: skip
            store.add([trace]).result()
            credit = StepCredit(
                trace_id=trace.id, session_id=session, training_step=0, episode_id=f"{task_id}:0", trajectory_name=role,
                reward=reward, dropped=dropped,
            )  # fmt: skip
            store.annotate([credit]).result()

    roll_out(
        "s1", "apples@0.0.0", "train", ("solver", None, 1.0), ("judge", "not_trainable", 0.3), ("solver", None, 1.0)
    )
    roll_out("s2", "apples@4.0.2", "train", ("solver", "zero_variance", 0.0))
    roll_out("s3", "apples", "eval", ("solver", None, 1.0))
    roll_out("s4", "apples@4.0.3", "train", ("", "timeout", None))
    store.open_session("s4", {OUTCOME_KEY: {"error": {"type": "RolloutTimeout"}}}).result()
    rows = rows_of_store(store)
    assert [(row["task_id"], row["name"], row["reward"], len(row["steps"])) for row in rows] == [
        ("apples", "solver", 1.0, 2),
        ("apples", "solver", 0.0, 1),
    ]
    assert [step["response_ids"] for step in rows[0]["steps"]] == [[5, 0], [5, 2]]


def test_scored_sessions_of_a_gateway_are_trained() -> None:
    store = open_store("memory:")

    def kept(session: str, metadata: dict[str, Any], *ids: int, **expected: Any) -> None:
        store.open_session(session, metadata).result()
        for token in ids:
            trace = Trace(
                id=f"{session}-{token}", call_id="c", session_id=session, model="m", messages=[QUESTION], response=ANSWER,
                prompt_ids=[1], response_ids=[token], logprobs=[-1.0], **expected,
            )  # fmt: skip
            store.add([trace]).result()

    kept("good", {"reward": 1, "task_id": "apples"}, 5, 6)
    kept("bad", {"reward": 0.25}, 7)
    kept("unscored", {}, 8)
    kept("not a number", {"reward": "high"}, 9)
    kept("an evaluation", {"reward": 1.0, "split": "eval"}, 10)
    kept("failed", {"reward": 1.0}, 11, error="no tokens")
    rows = rows_of_store(store)
    assert [(row["task_id"], row["name"], row["reward"]) for row in rows] == [
        ("apples", "agent", 1.0),
        ("bad", "agent", 0.25),
    ]
    assert [step["response_ids"] for step in rows[0]["steps"]] == [[5], [6]]
    assert rows_of_store(store, run_id="a run") == []


def test_trajectories_with_the_same_name_and_reward_are_separate_rows(run_trainer: RunTrainer) -> None:
    def two_solvers(word: str, base_url: str) -> list[Trajectory]:
        def solver(number: int) -> Trajectory:
            asked = {"role": "user", "content": f"{word} {number}"}
            answer = {"role": "assistant", "content": ask(base_url, [asked])}
            return Trajectory(name="solver", reward=1.0, steps=[Step(chat_completions=[asked, answer])])

        return [solver(1), solver(2)]

    run = run_trainer(
        {"num_steps": 1, "rollout": {"group_size": 1}, "algorithm": {"name": "reinforce"}}, agent=two_solvers
    )
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        rows = rows_of_store(store)
    assert [len(row["steps"]) for row in rows] == [1] * 4
    assert len(sampled_from(rows, reward_threshold=None, best_per_task=1)) == 2, "two tasks"


def test_call_shared_by_trajectories_is_a_step_of_each(run_trainer: RunTrainer) -> None:
    def planned(word: str, base_url: str) -> list[Trajectory]:
        def call(content: str) -> str:
            request = {"model": "policy", "messages": [{"role": "user", "content": content}]}
            found: str = httpx.post(f"{base_url}/chat/completions", json=request, timeout=60).json()["id"]
            return found

        plan = call(word)
        return [
            Trajectory(name="solver", reward=1.0, steps=[Step(id=plan), Step(id=call(f"solve {word}"))]),
            Trajectory(name="critic", reward=0.5, steps=[Step(id=plan), Step(id=call(f"doubt {word}"))]),
            Trajectory(name="judge", reward=0.0, steps=[Step(id=plan)]),
        ]

    config = {"num_steps": 1, "tasks_per_step": 1, "rollout": {"group_size": 1}, "algorithm": {"name": "reinforce"}}
    run = run_trainer({**config, "roles": {"judge": {"trainable": False}}}, agent=planned)
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        rows = rows_of_store(store)
        (session,) = store.sessions()
    assert [(row["name"], row["reward"], len(row["steps"])) for row in rows] == [("solver", 1.0, 2), ("critic", 0.5, 2)]
    found = session.metadata[OUTCOME_KEY]["trajectories"]
    assert [(path["name"], path["advantage"]) for path in found] == [("solver", 1.0), ("critic", 0.5), ("judge", None)]
