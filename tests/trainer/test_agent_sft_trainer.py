"""Supervised fine-tuning of a real, very small model, through the loop of reinforcement learning."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.algorithms.base import Algorithm
from rllm.data.dataset import Dataset
from rllm.demo import tasks
from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.episode_log import EpisodeLog
from rllm.errors import ConfigError
from rllm.evaluation.evaluate import Evaluation
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store import open_store
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.trainer.agent_sft_trainer import AgentSFTTrainer
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.trainer.settings import check_fit
from rllm.types import Episode, Message, Step, Trajectory

from .conftest import ask
from .reproducible import reproducible

RECIPE = TinyPolicyRecipe(
    hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=360, skill_steps=1, habit_steps=1, batch_size=4
)
speech = partial(tasks.conversations, tasks.CAREFUL, system="Answer.")
ROWS: list[dict[str, Any]] = [{"messages": messages} for messages in itertools.islice(speech(seed=5), 12)]
TRAIN, HELD_OUT = ROWS[:8], ROWS[8:]


@pytest.fixture(scope="module")
def policy(policies: Path) -> Path:
    return tiny_policy(
        lambda seed: speech(seed=seed),
        lambda seed: speech(seed=seed),
        recipe=RECIPE,
        cache_dir=policies,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config_of(policy: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(policy)},
        "run_dir": str(run_dir),
        "num_steps": 4,
        "tasks_per_step": 4,
        "save_every": 0,
        "optim": {"lr": 5e-3},
        "trackers": ["jsonl"],
        "store": "memory:",
        **changes,
    }


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def nll(folder: Path, conversations: list[list[Message]]) -> float:
    """Return nats per token of the answers, with transformers and torch alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).double()
    losses = []
    for messages in conversations:
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
                text = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False).removesuffix("\n")
                prompt = tokenizer.encode(asked, add_special_tokens=False)
                answer = tokenizer.encode(text.removeprefix(asked), add_special_tokens=False)
                with torch.no_grad():
                    logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
                targets = torch.tensor(answer)
                losses.append(
                    torch.nn.functional.cross_entropy(logits[len(prompt) - 1 : -1], targets, reduction="none")
                )
    return float(torch.cat(losses).mean())


def test_held_out_loss_falls_and_equals_that_of_torch(policy: Path, tmp_path: Path) -> None:
    result = AgentSFTTrainer(config_of(policy, tmp_path, eval={"every": 2}), TRAIN, HELD_OUT).train()
    losses = [metrics["eval/loss"] for metrics in result.evaluations]
    assert [metrics["step"] for metrics in result.evaluations] == [0, 2, 4]
    assert losses[2] < losses[1] < losses[0]
    conversations = [row["messages"] for row in HELD_OUT]
    assert losses[0] == pytest.approx(nll(policy, conversations), abs=1e-4)
    assert losses[2] == pytest.approx(nll(result.checkpoint, conversations), abs=1e-4)
    first = next(line for line in lines_of(tmp_path) if line["step"] == 1)
    assert first["policy/loss"] == pytest.approx(first["policy/nll"])
    compared = {"policy/sampler_gap_mean", "tokens/staleness", "rollout/reward", "rollout/accuracy", "policy/ratio"}
    assert not compared & first.keys(), "nothing was sampled, so there is nothing to compare"
    assert not [name for name in first if name.startswith("signal/")]


def test_resumed_run_equals_the_uninterrupted_one(policy: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    AgentSFTTrainer(config_of(policy, whole, store=None), TRAIN, HELD_OUT).train()
    AgentSFTTrainer(config_of(policy, halves, store=None, num_steps=3, save_every=2), TRAIN, HELD_OUT).train()
    shutil.rmtree(halves / "checkpoints" / "step-000003")  # as if it had been killed before it was saved
    AgentSFTTrainer(config_of(policy, halves, store=None), TRAIN, HELD_OUT, resume=True).train()
    assert [reproducible(line) for line in lines_of(halves)] == [reproducible(line) for line in lines_of(whole)]
    for run in (whole, halves):
        with closing(open_store(str(run / "traces.db"), read_only=True)) as store:
            assert len(store.sessions()) == 4 * 4, "one for each demonstration of each step"


def test_other_demonstrations_are_another_run(policy: Path, tmp_path: Path) -> None:
    AgentSFTTrainer(config_of(policy, tmp_path, num_steps=1), TRAIN).train()
    with pytest.raises(ConfigError, match="train_dataset was"):
        AgentSFTTrainer(config_of(policy, tmp_path), TRAIN[1:], resume=True)


def test_best_rollouts_are_trained_token_for_token(policy: Path, tmp_path: Path) -> None:
    seen: list[Episode] = []

    class Watching:
        def log(self, step: int, metrics: Any) -> None: ...
        def log_episodes(self, step: int, split: str, episodes: Any) -> None:
            seen.extend(episodes)

        def progress(self, phase: str, done: int, total: int) -> None: ...
        def close(self) -> None: ...

    def rolled_out(reward: float, *answer: int) -> Trajectory:
        step = Step(prompt_ids=[3, 4, 5], response_ids=list(answer), logprobs=[-0.1] * len(answer))
        return Trajectory(reward=reward, task={"question": "?"}, steps=[step])

    trajectories = [rolled_out(1.0, 9, 9, 2), rolled_out(0.0, 8, 2), rolled_out(0.75, 7)]
    config = config_of(policy, tmp_path, num_steps=1, tasks_per_step=2, sft={"reward_threshold": 0.5})
    AgentSFTTrainer(config, trajectories, trackers=[Watching()]).train()
    steps = [step for episode in seen for trajectory in episode.trajectories for step in trajectory.steps]
    assert sorted((step.prompt_ids, step.response_ids) for step in steps) == [([3, 4, 5], [7]), ([3, 4, 5], [9, 9, 2])]
    [line] = lines_of(tmp_path)
    assert line["sft/reward"] == 0.875
    assert "rollout/reward" not in line, "the rewards are not the policy's"
    one = AgentSFTTrainer(config_of(policy, tmp_path / "one", sft={"best_per_task": 1}), trajectories)
    assert len(one.train_data) == 1


@pytest.mark.parametrize("place", ["run/traces.db", "elsewhere.db"])
def test_rollouts_of_a_run_are_trained_token_for_token(policy: Path, tmp_path: Path, place: str) -> None:
    def agent(question: str, base_url: str) -> float:
        return float(len(ask(base_url, question, max_tokens=5)) % 3)

    run, config = tmp_path / "run", {**config_of(policy, tmp_path / "run", num_steps=1), "rollout": {"group_size": 3}}
    config["store"] = None if place.startswith("run/") else str(tmp_path / place)
    AgentTrainer(
        agent_run_func=agent, train_dataset=[{"question": "figs?"}, {"question": "limes?"}], config=config
    ).train()
    with closing(open_store(str(tmp_path / place), read_only=True)) as store:
        traces = [trace for info in store.sessions() for trace in store.by_session(info.id)]
    data = AgentSFTTrainer(config_of(policy, tmp_path / "sft"), str(run)).train_data
    steps = [step for row in data for step in row["demonstration"].trajectory().steps]
    assert sorted((step.prompt_ids, step.response_ids) for step in steps) == sorted(
        (trace.prompt_ids, trace.response_ids) for trace in traces
    )
    best = AgentSFTTrainer(config_of(policy, tmp_path / "sft", sft={"best_per_task": 1}), tmp_path / place).train_data
    assert sorted(row["task_id"] for row in best) == ["0", "1"]


async def test_best_of_an_evaluation_is_trained_token_for_token(policy: Path, tmp_path: Path) -> None:
    async def agent(question: str, base_url: str) -> list[Trajectory]:
        asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
        async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            judged, answer = [await client.chat.completions.create(model="policy", messages=asked) for _ in range(2)]
        return [
            Trajectory(name="judge", steps=[Step(id=judged.id)], reward=1.0, trainable=False),
            Trajectory(steps=[Step(id=answer.id, chat_completions=[*asked])], reward=float(question == "figs?")),
        ]

    folder, questions = tmp_path / "eval", Dataset([{"question": "figs?"}, {"question": "limes?"}])
    with (
        Evaluation.opened(questions, folder=folder, identity={}) as evaluation,
        closing(open_store(str(folder / "traces.db"))) as store,
        GatewayServer(store, EngineUpstream(ScriptedEngine(["!"] * 4), "policy")) as gateway,
        AgentFunctionEngine(agent, gateway=gateway, store=store) as engine,
    ):
        await evaluation.run(engine)
        traces = {trace.id: trace for info in store.sessions() for trace in store.by_session(info.id)}
    [answer] = [item.trajectories[1].steps[0] for item in EpisodeLog.read(folder / "episodes.jsonl") if item.is_correct]
    config = config_of(policy, tmp_path / "sft", sft={"reward_threshold": 0.5})
    for source in (folder, str(folder / "episodes.jsonl")):
        (row,) = AgentSFTTrainer(config, source).train_data
        (step,) = row["demonstration"].trajectory().steps
        assert (step.prompt_ids, step.response_ids) == (traces[answer.id].prompt_ids, traces[answer.id].response_ids)


def test_adapter_is_trained_and_the_best_checkpoint_kept(policy: Path, tmp_path: Path) -> None:
    config = config_of(
        policy, tmp_path, num_steps=2, eval={"every": 1}, keep_best="-eval/loss", model={"path": str(policy), "lora_rank": 2}
    )  # fmt: skip
    result = AgentSFTTrainer(config, TRAIN, HELD_OUT).train()
    assert result.best == result.checkpoint
    assert (result.checkpoint / "adapter_config.json").exists()


def test_roles_have_weights_and_can_be_frozen(policy: Path, tmp_path: Path) -> None:
    rows = [{**TRAIN[0], "name": "solver"}, {**TRAIN[1], "name": "judge"}, {**TRAIN[2], "name": "idle"}]
    roles = {"solver": {"weight": 2.0}, "idle": {"trainable": False}}
    AgentSFTTrainer(config_of(policy, tmp_path, num_steps=1, tasks_per_step=3, roles=roles), rows).train()
    (line,) = lines_of(tmp_path)
    assert (line["dropped/not_trainable"], line["batch/num_sequences"]) == (1.0, 2.0)
    assert line["batch/advantage"] == 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"group_size": 4}}, r"rollout\.group_size=4"),
        ({"rollout": {"group_size": 8}}, r"rollout\.group_size=8"),
        ({"algorithm": {"name": "grpo"}}, r"algorithm\.name=grpo learns from rollouts"),
        ({"rollout": {"temperature": 0.5}}, r"rollout\.temperature=0\.5 would have no effect"),
        ({"rollout": {"max_staleness": 1}}, r"rollout\.max_staleness=1 would have no effect"),
        ({"eval": {"num_rollouts": 2}}, r"eval\.num_rollouts=2 would have no effect"),
        ({"filters": {"truncated": True}}, r"filters\.truncated=True would have no effect"),
        ({"gateway": {"port": 8123}}, r"gateway\.port=8123 would have no effect"),
        ({"critic": {"lr": 0.1}}, r"critic\.lr=0\.1 would have no effect"),
        ({"algorithm": {"name": "grpo", "clip_low": 0.1}}, r"algorithm\.name=grpo learns from rollouts"),
        ({"algorithm": {"correction": "mask"}}, r"algorithm\.correction='mask'"),
        (
            {"keep_best": "eval/loss"},
            r"keep_best='eval/loss' keeps the checkpoint with the highest value.*: use keep_best=-eval/loss",
        ),
        ({"model": {}}, r"model\.path is not set"),
        ({"sft": {"reward_threshold": 0.5}}, r"sft\.reward_threshold needs rewards"),
        ({"sft": {"train_on": "some"}}, r"sft\.train_on='some'"),
        ({"teacher": {"path": "x"}}, r"teacher is set"),
    ],
)
def test_ineffective_settings_are_rejected(policy: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentSFTTrainer(load_config(config_of(policy, tmp_path / "run", **changes)), TRAIN, HELD_OUT).train()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_inference_server_is_rejected_as_ineffective() -> None:
    config = load_config(["algorithm.name=sft", "rollout.group_size=1", "model.engine=vllm"])
    with pytest.raises(ConfigError, match=r"model\.engine='vllm' would have no effect"):
        check_fit(config, demonstrates=True)


@pytest.mark.parametrize(
    ("data", "expected_message"),
    [
        ([], "train_dataset is empty"),
        ([{"messages": []}], "train_dataset: row 0: no assistant message"),
        (7, "train_dataset=7: use rows, trajectories, episodes"),
        (["text"], "row 0 is 'text': use an object with messages"),
    ],
)
def test_invalid_data_is_reported(policy: Path, tmp_path: Path, data: Any, expected_message: str) -> None:
    with pytest.raises(ConfigError, match=expected_message):
        AgentSFTTrainer(config_of(policy, tmp_path), data)


def test_gateway_store_without_rewards_is_rejected_with_the_remedy(policy: Path, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("first", {"reward": 1.0}).result()
    message = r"traces\.db' has no rollouts with a reward, and no session .* `reward` in its metadata"
    with pytest.raises(ConfigError, match=message):
        AgentSFTTrainer(config_of(policy, tmp_path / "run"), tmp_path / "traces.db")


def test_rows_without_trainable_tokens_are_rejected(policy: Path, tmp_path: Path) -> None:
    config = config_of(policy, tmp_path, roles={"judge": {"trainable": False}})
    judged = [{**row, "name": "judge"} for row in HELD_OUT]
    AgentSFTTrainer(config, TRAIN, [*judged, HELD_OUT[0]])
    for train, held_out, name in ((judged, HELD_OUT, "train_dataset"), (TRAIN, judged, "val_dataset")):
        with pytest.raises(ConfigError, match=rf"{name}: no row .* \(roles\.judge\.trainable=false\)"):
            AgentSFTTrainer(config, train, held_out)


def test_agent_trainer_rejects_fine_tuning(policy: Path, tmp_path: Path) -> None:
    def agent(question: str) -> float:
        return 1.0

    for changes, message in (
        ({"algorithm": {"name": "sft"}}, r"algorithm\.name=sft learns from demonstrations.*use AgentSFTTrainer"),
        ({"sft": {"train_on": "last"}}, r"sft\.train_on='last' would have no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            AgentTrainer(
                agent_run_func=agent, train_dataset=[{"question": "?"}], config=config_of(policy, tmp_path, **changes)
            )
    assert not Algorithm.demonstrated
