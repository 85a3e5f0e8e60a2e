"""An ordinary `openai` agent, the gateway, SQLite, the embedded sampler and a real, very small model."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from rllm.algorithms.batch import Batch
from rllm.backends.base import UpdatePlan
from rllm.backends.local.backend import LocalBackend
from rllm.demo import tasks
from rllm.inference.engine import ModelOutput
from rllm.inference.local.engine import LocalEngine
from rllm.store import open_store
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types import Episode

RECIPE = TinyPolicyRecipe(
    hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400, skill_steps=12, habit_steps=2, batch_size=8
)
QUESTIONS = [{"question": f"How many {item} are left?"} for item in ("figs", "limes", "plums")]


@pytest.fixture(scope="module")
def policy(policies: Path) -> Path:
    """A model trained on a few conversations of the demo's clerk."""
    speech = partial(tasks.conversations, tasks.CAREFUL, system="Answer.")
    return tiny_policy(
        lambda seed: speech(seed=seed),
        lambda seed: speech(seed=seed),
        recipe=RECIPE,
        cache_dir=policies,
    )


class Sampled:
    """Samples of the engine, as it returned them: (prompt ids, answer ids) of every call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.logprobs: dict[tuple[int, ...], list[float]] = {}

    def keep(self, output: ModelOutput) -> None:
        with self.lock:
            self.calls.append((tuple(output.prompt_ids), tuple(output.completion_ids)))
            self.logprobs[(*output.prompt_ids, *output.completion_ids)] = list(output.logprobs)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Sampled:
    kept = Sampled()
    original = LocalEngine.get_model_response

    async def recorded(self: LocalEngine, *args: Any, **options: Any) -> ModelOutput:
        output = await original(self, *args, **options)
        kept.keep(output)
        return output

    monkeypatch.setattr(LocalEngine, "get_model_response", recorded)
    return kept


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Batches on which the loss was computed."""
    kept: list[Batch] = []
    original = LocalBackend.begin_update

    def recorded(self: LocalBackend, batch: Batch) -> UpdatePlan:
        kept.append(batch)
        return original(self, batch)

    monkeypatch.setattr(LocalBackend, "begin_update", recorded)
    return kept


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Agent:
    """Two turns with a shared, ordinary client; every other attempt at a question is rewarded."""

    clients: ClassVar[list[openai.OpenAI]] = []

    def __init__(self) -> None:
        self.client: openai.OpenAI | None = None
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def __call__(self, question: str) -> Any:
        return self.attempt(question, next(self.numbers))

    def attempt(self, question: str, number: int) -> Any:
        with self.lock:
            if self.client is None:
                self.client = openai.OpenAI()
                self.clients.append(self.client)
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(2):
            response = self.client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            answer = response.choices[0].message
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
        with self.lock:
            return float(next(self.turns[question]) % 2)


@pytest.fixture(autouse=True)
def no_connection_is_left() -> Iterator[None]:
    yield
    while Agent.clients:
        Agent.clients.pop().close()


def trainer_of(policy: Path, run_dir: Path, agent: Any, *, num_steps: int = 2, **options: Any) -> AgentTrainer:
    config = {
        "model": {"path": str(policy)},
        "run_dir": str(run_dir),
        "num_steps": num_steps,
        "tasks_per_step": 2,
        "save_every": 0,
        "rollout": {"group_size": 4},
        "optim": {"lr": 1e-3},
        "trackers": ["jsonl"],
    }
    return AgentTrainer(agent_run_func=agent, train_dataset=QUESTIONS, config=config, **options)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_trained_tokens_are_the_sampled_ones_byte_for_byte(
    policy: Path, tmp_path: Path, sampled: Sampled, batches: list[Batch]
) -> None:
    trainer_of(policy, tmp_path, Agent()).train()
    trained = []
    for batch in batches:
        for sequence in batch.sequences:
            logprobs = iter(sequence.logprobs)
            for span in sequence.spans:
                prompt, answer = tuple(sequence.ids[: span.start]), tuple(sequence.ids[span.start : span.stop])
                trained.append((prompt, answer))
                assert [next(logprobs) for _ in answer] == sampled.logprobs[prompt + answer]
        assert batch.ids.tolist() == [
            sequence.ids[place] for sequence in batch.sequences for place in sequence.sampled_positions()
        ]
    assert len(sampled.calls) == 2 * 8 * 2
    assert sorted(trained) == sorted(sampled.calls), "every sampled token once, and nothing else"


def test_trainer_probabilities_equal_those_of_the_sampler(policy: Path, tmp_path: Path) -> None:
    trainer_of(policy, tmp_path, Agent(), num_steps=3).train()
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["policy/sampler_gap_max"] for line in lines) < 1e-4, "after each update, too"
    assert min(line["policy/grad_norm"] for line in lines) > 0
    assert all(line["rollout/num_failed"] == 0 for line in lines)


def test_run_writes_its_files(policy: Path, tmp_path: Path) -> None:
    result = trainer_of(policy, tmp_path, Agent()).train()
    assert {path.name for path in tmp_path.iterdir()} >= {"metrics.jsonl", "traces.db", "checkpoints", "config.yaml"}
    assert result.checkpoint == tmp_path / "checkpoints" / "step-000002"
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (policy, result.checkpoint))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    with open_store(str(tmp_path / "traces.db"), read_only=True) as store:
        sessions = store.sessions(limit=1000)
        assert [info.num_traces for info in sessions] == [2] * 16
        traces = store.by_session(sessions[0].id)
        assert traces[0].sampling["top_p"] == 1.0
        assert {trace.weight_version for trace in traces} == {1}, "the newest session is of the second step"
        assert len(store.credits(sessions[0].id)) == 2


class Unreliable(Agent):
    """Agent that raises, returns nothing, or never calls the model, each for some of the attempts."""

    def attempt(self, question: str, number: int) -> Any:
        if number % 8 == 1:
            raise KeyError("lost")
        if number % 8 == 2:
            return 1.0
        reward = super().attempt(question, number)
        return None if number % 8 == 3 else reward


def test_siblings_of_a_failed_rollout_are_trained(policy: Path, tmp_path: Path, batches: list[Batch]) -> None:
    trainer_of(policy, tmp_path, Unreliable()).train()
    for line in lines_of(tmp_path):
        assert line["rollout/num_failed"] == 2
        assert line["rollout/num_unscored"] == 1
    assert [len(batch) for batch in batches if len(batch)], "the others were trained on"


class Stop:
    """Tracker that sends Ctrl-C when the metrics of the second step arrive."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...

    def close(self) -> None: ...


def test_interrupted_run_is_resumed(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer_of(policy, tmp_path, Agent(), num_steps=4, trackers=[Stop()]).train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    result = trainer_of(policy, tmp_path, Agent(), num_steps=4, resume=True).train()
    assert result.num_steps == 4
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["policy/weight_version"] for line in lines] == [1, 2, 3, 4]


async def async_agent(question: str) -> float:
    async with openai.AsyncOpenAI() as client:
        messages: Any = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(model="x", messages=messages, max_tokens=5, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    await asyncio.sleep(0)
    return float(len(text) % 2)


def test_async_agent_may_stream(policy: Path, tmp_path: Path) -> None:
    trainer_of(policy, tmp_path, async_agent, num_steps=1).train()
    (line,) = lines_of(tmp_path)
    assert line["rollout/num_failed"] == 0
    assert line["rollout/calls_per_episode"] == 1
