"""Teachers: in this process, and on a server in vLLM's format; and the updates of the policy by their scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.distill import Distill
from rllm.algorithms.grpo import GRPO
from rllm.config.schema import RoleConfig, TeacherConfig
from rllm.errors import ConfigError, InferenceError
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.trainer.credit import Assembled, assemble
from rllm.trainer.settings import make_algorithm
from rllm.trainer.teacher import TeacherEndpoint, check_teacher, open_teacher
from rllm.types import Episode, Step, Trajectory

from .conftest import ask
from .teacher_server import TeacherServer

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
TEXTS = ["a fig", "what does a kiwi cost today"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(*, seed: int = 0, texts: list[str] = TEXTS) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tokenizer = train_tokenizer(texts, vocab_size=290)
        new_model(tokenizer, TinyPolicyRecipe(**SIZES, seed=seed)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def student(make_folder: Callable[..., Path]) -> Path:
    return make_folder()


@pytest.fixture(scope="module")
def teacher(make_folder: Callable[..., Path]) -> Path:
    return make_folder(seed=1)


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, vocab_size=290)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return new_model(tokenizer, TinyPolicyRecipe(**SIZES, seed=1)).eval()


class Scripted:
    """A teacher with scripted scores."""

    def __init__(self, *logprobs: float) -> None:
        self.logprobs = torch.tensor(logprobs)

    def score(self, batch: Batch, samples: object = ()) -> Tensor:
        return self.logprobs


def assembled(
    algorithm: Algorithm, *rewards: float | None, roles: Any = None, logprobs: Any = (), scorer: Any = None
) -> Assembled:
    """Return rollouts of one task, of two tokens each, sampled with log-probabilities of -1."""
    episodes = [
        Episode(
            task_id="t",
            index=index,
            trajectories=[
                Trajectory(
                    reward=reward, steps=[Step(prompt_ids=[1], response_ids=[2, 3 + index], logprobs=[-1.0, -1.0])]
                )
            ],
        )
        for index, reward in enumerate(rewards)
    ]
    return assemble(
        episodes, algorithm, step=0, temperature=1.0, teacher=Scripted(*logprobs), scorer=scorer, roles=roles
    )


def test_advantage_of_a_token_comes_from_the_teacher() -> None:
    found = assembled(Distill(teacher_coef=0.5), None, None, logprobs=(-0.5, -3.0, -1.0, -1.0))
    assert found.batch.advantages.tolist() == [0.25, -1.0, 0.0, 0.0]
    assert found.batch.teacher_logprobs is not None
    assert [credit.advantage for credit in found.credits] == [-0.375, 0.0], "the mean over a step's tokens"
    assert (found.dropped, found.num_uniform_groups) == ({}, 0), "unscored rollouts learn from a teacher"


def test_teacher_is_compared_with_the_current_policy() -> None:
    """Answers of a run with rollout.max_staleness, or of a sampler that differs slightly from the trainer."""
    found = assembled(Distill(correction="truncate"), None, logprobs=(-0.5, -3.0), scorer=Scripted(-0.5, -2.0))
    assert found.batch.advantages.tolist() == [0.0, -1.0]


def test_rewards_and_teacher_are_combined() -> None:
    algorithm = GRPO(normalize_std=False, teacher_coef=0.5)
    found = assembled(algorithm, 1.0, 0.0, logprobs=(-0.5, -3.0, -1.0, -1.0))
    assert found.batch.advantages.tolist() == [0.75, -0.5, -0.5, -0.5]
    alike = assembled(algorithm, 1.0, 1.0, logprobs=(-0.5, -3.0, -1.0, -1.0))
    assert alike.batch.advantages.tolist() == [0.25, -1.0, 0.0, 0.0]


def test_role_weight_applies_to_the_teacher() -> None:
    found = assembled(Distill(), None, roles={"agent": RoleConfig(weight=2.0)}, logprobs=(-0.5, -3.0))
    assert found.batch.advantages.tolist() == [1.0, -4.0]


def test_each_step_has_its_own_teacher_advantage() -> None:
    found = assembled(GRPO(level="step", teacher_coef=1.0), 1.0, 1.0, logprobs=(-0.5, -3.0, -1.0, -2.0))
    assert [credit.advantage for credit in found.credits] == [-0.75, -0.5]


def batch_of(*rows: list[int]) -> Batch:
    """Return sequences whose first two tokens are the prompt."""
    spans = [[StepSpan(step_id=str(row), start=2, stop=len(ids))] for row, ids in enumerate(rows)]
    logprobs = [[-1.0] * (len(ids) - 2) for ids in rows]
    return Batch.of(
        [TokenSequence(ids=ids, spans=a, logprobs=b) for ids, a, b in zip(rows, spans, logprobs, strict=True)]
    )


def by_hand(model: Any, *rows: list[int]) -> list[float]:
    values = []
    for ids in rows:
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        values += [float(logprobs[place - 1, ids[place]]) for place in range(2, len(ids))]
    return values


ROWS = [[5, 6, 7, 8], [5, 6, 9], [200, 100, 50, 25, 12, 6]]


def test_server_scores_the_exact_tokens(model: Any, tokenizer: Any) -> None:
    with (
        TeacherServer(model, tokenizer) as server,
        TeacherEndpoint(TeacherConfig(url=server.url, max_concurrent=2)) as endpoint,
    ):
        endpoint.check(tokenizer)
        server.requests.clear()
        scores = endpoint.score(batch_of(*ROWS))
    assert scores.tolist() == pytest.approx(by_hand(model, *ROWS), abs=1e-5)
    assert sorted(request["prompt"] for request in server.requests) == sorted(ROWS)
    assert {(request["model"], request["prompt_logprobs"]) for request in server.requests} == {("teacher", 0)}


def test_local_model_scores_the_exact_tokens(student: Path, teacher: Path, model: Any) -> None:
    config = load_config([f"model.path={student}", f"teacher.path={teacher}", "algorithm.name=distill"])
    check_teacher(config, Distill())
    with open_teacher(config, Distill()) as opened:
        assert opened is not None
        scores = opened.score(batch_of(*ROWS))
    assert scores.tolist() == pytest.approx(by_hand(model, *ROWS), abs=1e-4)


def test_busy_server_is_retried(model: Any, tokenizer: Any) -> None:
    with TeacherServer(model, tokenizer) as server:
        server.fault = "busy"
        with TeacherEndpoint(TeacherConfig(url=server.url, model="teacher")) as endpoint:
            assert len(endpoint.score(batch_of(ROWS[0]))) == 2
        server.fault = "busy"
        with (
            TeacherEndpoint(TeacherConfig(url=server.url, model="teacher", num_retries=0)) as endpoint,
            pytest.raises(InferenceError, match=r"answered 503: .*try again"),
        ):
            endpoint.score(batch_of(ROWS[0]))


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            "omits",
            ConfigError,
            "returns no prompt_logprobs: use a server .* such as vLLM, or run the teacher in",
        ),
        ("short", InferenceError, "3 log-probabilities .* 4 tokens"),
        ("nan", InferenceError, "{'0': {'logprob': None}} .*token 6, number 1"),
    ],
)
def test_missing_fields_of_a_server_are_reported(
    model: Any, tokenizer: Any, fault: str, kind: type[Exception], message: str
) -> None:
    with (
        TeacherServer(model, tokenizer) as server,
        TeacherEndpoint(TeacherConfig(url=server.url, model="teacher")) as endpoint,
    ):
        server.fault = fault
        with pytest.raises(kind, match=message):
            endpoint.score(batch_of(ROWS[0]))


def test_server_with_another_vocabulary_is_rejected(model: Any, tokenizer: Any) -> None:
    longer = train_tokenizer(["an entirely different text, and a longer one"] * 3, vocab_size=300)
    other = train_tokenizer(["zebra zebra xylophone"] * 3, vocab_size=290)
    with TeacherServer(model, tokenizer) as server, TeacherEndpoint(TeacherConfig(url=server.url)) as endpoint:
        with pytest.raises(ConfigError, match=r"does not accept ids of the policy's vocabulary.*out of vocabulary"):
            endpoint.check(longer)
        with pytest.raises(ConfigError, match=r"has another vocabulary than the policy: token \d+ is '.*' there and"):
            endpoint.check(other)


def test_missing_server_or_ambiguous_model_is_reported(model: Any, tokenizer: Any) -> None:
    with (
        TeacherServer(model, tokenizer, names=("one", "two")) as server,
        TeacherEndpoint(TeacherConfig(url=server.url)) as endpoint,
        pytest.raises(ConfigError, match=r"teacher\.model is missing: .* serves one, two; choose one"),
    ):
        endpoint.check(tokenizer)
    with TeacherServer(model, tokenizer) as server:
        server.fault = "no list"
        with (
            TeacherEndpoint(TeacherConfig(url=server.url)) as endpoint,
            pytest.raises(InferenceError, match="answered 404"),
        ):
            endpoint.check(tokenizer)
        with TeacherEndpoint(TeacherConfig(url=server.url, model="teacher")) as endpoint:
            endpoint.check(tokenizer)
    with (
        TeacherEndpoint(TeacherConfig(url=server.url, num_retries=0)) as endpoint,
        pytest.raises(InferenceError, match="cannot be reached"),
    ):
        endpoint.check(tokenizer)
    with pytest.raises(ConfigError, match=r"teacher\.url='localhost:8000': use an address such as http://"):
        TeacherEndpoint(TeacherConfig(url="localhost:8000"))


def test_model_with_another_vocabulary_is_rejected(student: Path, make_folder: Callable[..., Path]) -> None:
    other = make_folder(texts=["an entirely different text"])
    config = load_config([f"model.path={student}", f"teacher.path={other}", "algorithm.name=distill"])
    with pytest.raises(ConfigError, match=r"has another vocabulary than model\.path=.*tokens differ, such as"):
        check_teacher(config, Distill())


def test_teacher_with_a_shorter_context_than_the_policy_is_rejected(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    shutil.copytree(teacher, tmp_path / "short")
    about = json.loads((teacher / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**about, "max_position_embeddings": 40}))
    base = [f"model.path={student}", "algorithm.name=distill"]
    limit = about["max_position_embeddings"]
    message = rf" takes 40 tokens, .* \({limit}\): set model\.max_length=40"
    short = f"teacher.path={tmp_path / 'short'}"
    with pytest.raises(ConfigError, match=f"short'{message}"):
        check_teacher(load_config([*base, short]), Distill())
    check_teacher(load_config([*base, short, "model.max_length=40"]), Distill())


def test_server_needs_context_for_one_more_token(student: Path, model: Any, tokenizer: Any) -> None:
    with TeacherServer(model, tokenizer, max_model_len=100) as server:
        settings = [f"model.path={student}", "algorithm.name=distill", f"teacher.url={server.url}"]
        message = r" takes 99 tokens, .* \(100\): set model\.max_length=99"
        with (
            pytest.raises(ConfigError, match=rf"teacher\.url='{server.url}'{message}"),
            open_teacher(load_config([*settings, "model.max_length=100"]), Distill()),
        ):
            pass
        with open_teacher(load_config([*settings, "model.max_length=99"]), Distill()) as opened:
            assert opened is not None
            assert len(opened.score(batch_of([5] * 99))) == 97


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.name=distill"], r"teacher\.path=None and teacher\.url=None: .*set one of the two"),
        (["algorithm.name=distill", "teacher.path=a", "teacher.url=http://b"], "set one of the two"),
        (
            ["algorithm.name=distill", "teacher.url=http://b", "teacher.device=cpu"],
            r"teacher\.device='cpu' would have no effect on a server",
        ),
        (
            ["algorithm.name=distill", "teacher.path=a", "teacher.timeout_s=3"],
            r"teacher\.timeout_s=3\.0 would have no effect on a teacher in this process",
        ),
        (["teacher.url=http://b"], "teacher is set"),
        (
            ["algorithm.teacher_coef=0.1", "teacher.url=http://b", "rollout.temperature=0.7"],
            r"rollout\.temperature=0\.7: the prompt log-probabilities of a server are those at temperature 1",
        ),
    ],
)
def test_teacher_settings_require_each_other(settings: list[str], message: str) -> None:
    config = load_config(settings)
    with pytest.raises(ConfigError, match=message):
        check_teacher(config, make_algorithm(config))


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def speak(word: str, base_url: str) -> None:
    """Call the model, and return no reward."""
    ask(base_url, word, max_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("served", [False, True], ids=["in this process", "behind a server"])
def test_policy_approaches_its_teacher(
    student: Path, teacher: Path, model: Any, tokenizer: Any, tmp_path: Path, served: bool
) -> None:
    with TeacherServer(model, tokenizer) as server:
        config = {
            "model": {"path": str(student)},
            "run_dir": str(tmp_path),
            "num_steps": 6,
            "tasks_per_step": 4,
            "save_every": 0,
            "rollout": {"group_size": 4},
            "optim": {"lr": 2e-2},
            "algorithm": {"name": "distill"},
            "teacher": {"url": server.url} if served else {"path": str(teacher)},
            "trackers": ["jsonl"],
            "store": "memory:",
        }
        words = [{"word": word} for word in ("fig", "kiwi", "apple", "papaya")]
        AgentTrainer(agent_run_func=speak, train_dataset=words, config=config).train()
    lines = lines_of(tmp_path)
    divergence = [line["policy/teacher_kl"] for line in lines]
    assert min(divergence[3:]) < 0.9 * divergence[0]
    known = {name for line in lines for name in line}
    assert not {"signal/no_variance", "rollout/reward"} & known, "missing rewards are not reported"
    assert not [name for name in known if name.startswith("dropped/")]
