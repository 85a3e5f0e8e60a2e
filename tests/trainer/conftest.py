"""A backend without a model, and a way to run the trainer with it."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.backends.base import StepResult, UpdatePlan
from rllm.inference.engine import ModelOutput
from rllm.testing.scripted import ScriptedEngine, encode_prompt
from rllm.trainer.agent_trainer import AgentTrainer, TrainResult
from rllm.trainer.config import TrainConfig

TASKS = [{"word": word} for word in ("fig", "kiwi", "apple", "papaya")]


class RecordingEngine(ScriptedEngine):
    """Scripted model that repeats the last message, and records the parameters of every call."""

    def __init__(self) -> None:
        super().__init__(lambda messages: messages[-1]["content"])
        self.params: list[dict[str, Any]] = []
        self.num_live, self.most_live = 0, 0

    async def get_model_response(self, messages: Any, *, tools: Any = None, **params: Any) -> ModelOutput:
        self.params.append(params)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        self._latency_s = 0.01
        try:
            return await super().get_model_response(messages, tools=tools, **params)
        finally:
            self.num_live -= 1

    def continued_prompt(self, known_ids: list[int], messages: Any, num_known: int, **options: Any) -> list[int]:
        """Return the prompt; calls with it are recorded in `params`."""
        return [*known_ids, *encode_prompt(messages[num_known:], None)]


class ScriptedBackend:
    """Backend that learns nothing, and records its calls. `ScriptedBackend.latest` is the newest one."""

    latest: ClassVar[ScriptedBackend]

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.inference = RecordingEngine()
        self.batches: list[Batch] = []
        self.algorithms: list[Algorithm] = []
        self.saved_at: list[int] = []
        self.events: list[str] = []
        ScriptedBackend.latest = self

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Accept any configuration."""

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        return cls(config)

    @property
    def weight_version(self) -> int:
        return self.inference.weight_version

    def score(self, batch: Batch) -> Tensor:
        return batch.sampler_logprobs

    def score_reference(self, batch: Batch) -> Tensor:
        return batch.sampler_logprobs

    def values(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.num_tokens)

    def energies(self, batch: Batch) -> Tensor:
        return torch.ones(batch.num_tokens)

    learning_rate = 0.0

    def begin_update(self, batch: Batch) -> UpdatePlan:
        self.events.append("update")
        self.batches.append(batch)
        return UpdatePlan(num_forward_tokens=batch.num_tokens)

    def step(self, role: str, part: Batch, algorithm: Algorithm, *, scale: float) -> StepResult:
        self.algorithms.append(algorithm)
        return StepResult(sums=Counter(), grad_norm=0.0, logprobs=part.sampler_logprobs - 0.5)

    def publish(self) -> int:
        self.events.append("publish")
        self.inference.weight_version += 1
        return self.weight_version

    def save(self, folder: Path) -> None:
        self.saved_at.append(self.weight_version)
        (folder / "version").write_text(str(self.weight_version))

    def load(self, folder: Path) -> None:
        self.inference.weight_version = int((folder / "version").read_text())

    def close(self) -> None:
        self.events.append("close")


BACKEND = f"{__name__}:ScriptedBackend"


def ask(base_url: str, messages: str | list[dict[str, str]], *, api_key: str = "", **options: Any) -> str:
    """Send one short chat call, and return its text."""
    content: str = ask_for(base_url, messages, api_key=api_key, **options)["choices"][0]["message"]["content"]
    return content


def ask_for(
    base_url: str, messages: str | list[dict[str, str]], *, api_key: str = "", **options: Any
) -> dict[str, Any]:
    """Send a chat call, and return its whole answer."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@dataclass
class Run:
    """Result of a run."""

    trainer: AgentTrainer
    backend: ScriptedBackend
    urls: list[str]
    words: list[str]
    """The tasks, in the order in which their rollouts started."""
    result: TrainResult | None = None
    error: BaseException | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def params(self) -> list[dict[str, Any]]:
        return self.backend.inference.params

    @property
    def steps(self) -> list[int]:
        """The steps of `metrics.jsonl`, evaluations left out."""
        return [line["step"] for line in self.lines if "timing/step_s" in line]


RunTrainer = Callable[..., Run]


@pytest.fixture
def run_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunTrainer]:
    """`run_trainer({"num_steps": 3}, agent=f, val=True)`: a run over four words with the scripted backend.

    The agent's own reward is 1 for every other rollout of a word.
    """
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(
        config: Mapping[str, Any] | None = None,
        *,
        agent: Callable[..., Any] | None = None,
        val: bool = False,
        raises: type[BaseException] | None = None,
        **options: Any,
    ) -> Run:
        lock, urls, words = threading.Lock(), [], []

        def echo(word: str, base_url: str) -> float:
            with lock:
                urls.append(base_url)
                words.append(word)
                turn = words.count(word)
            if agent is not None:
                reward: float = agent(word, base_url)
                return reward
            ask(base_url, word)
            return float(turn % 2)

        settings = {
            "run_dir": str(tmp_path / "run"),
            "num_steps": 2,
            "tasks_per_step": 2,
            "backend": BACKEND,
            "trackers": ["jsonl"],
            "model": {"path": "scripted"},
            "rollout": {"group_size": 3},
        }
        settings = merged(settings, config or {})
        val_tasks = [{"word": "lime"}, {"word": "plum"}] if val else None
        trainer = AgentTrainer(
            agent_run_func=echo, train_dataset=TASKS, val_dataset=val_tasks, config=settings, **options
        )
        result, error = None, None
        if raises is None:
            result = trainer.train()
        else:
            with pytest.raises(raises) as caught:
                trainer.train()
            error = caught.value
        path = trainer.run_dir / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return Run(trainer, ScriptedBackend.latest, urls, words, result, error, lines)

    yield run
    torch.manual_seed(0)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return `one` with the values of `other` in its place, section by section."""
    return {
        **one,
        **{
            name: merged(one[name], value)
            if isinstance(value, Mapping) and isinstance(one.get(name), Mapping)
            else value
            for name, value in other.items()
        },
    }
