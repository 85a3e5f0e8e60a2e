"""Self-distillation: the policy, given a demonstration, scores its own answers without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rllm.algorithms.sdft import SDFT
from rllm.backends.local.backend import LocalBackend
from rllm.config.loading import load_config
from rllm.config.schema import OptimConfig
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedModel, LoadedTokenizer
from rllm.parser.chat_template import ChatTemplate
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.credit import assemble
from rllm.trainer.teacher import SelfTeacher, check_demonstrations, check_teacher
from rllm.types import Episode, Step, Trajectory

CURRENT = SDFT(teacher_weights="current", instruction="Like this:")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["what is the price of an apple? like this: one"] * 4, vocab_size=290)


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> Iterator[LocalBackend]:
    model = new_model(tokenizer, TinyPolicyRecipe(**SIZES)).eval()
    loaded = LoadedModel(model=model, tokenizer=tokenizer, device=torch.device("cpu"))
    backend = LocalBackend(loaded, OptimConfig(lr=1e-3))
    yield backend
    backend.close()


@pytest.fixture
def make_teacher(tokenizer: Any, backend: LocalBackend) -> Callable[..., SelfTeacher]:
    def make(context_length: int | None = None) -> SelfTeacher:
        return SelfTeacher(
            backend,
            CURRENT,
            LoadedTokenizer(tokenizer=tokenizer, num_ids=len(tokenizer), context_length=context_length),
        )

    return make


def episodes() -> list[Episode]:
    """Return episodes of two tasks; the second has two turns, with the first answer in the second prompt."""
    turns = [[([5, 6], [7, 8])], [([5, 9], [10]), ([5, 9, 10, 11], [12, 13])]]
    return [
        Episode(
            task_id=str(index),
            task={"question": "?", "demonstration": f"answer {index}"},
            trajectories=[
                Trajectory(steps=[Step(prompt_ids=a, response_ids=b, logprobs=[-1.0] * len(b)) for a, b in steps])
            ],
        )
        for index, steps in enumerate(turns)
    ]


def test_tokens_are_scored_with_the_demonstration_of_their_task(
    make_teacher: Callable[..., SelfTeacher], backend: LocalBackend, tokenizer: Any
) -> None:
    found = assemble(episodes(), CURRENT, step=0, temperature=1.0, teacher=make_teacher(), scorer=backend)
    expected = []
    for index, (ids, places) in enumerate([([5, 6, 7, 8], [2, 3]), ([5, 9, 10, 11, 12, 13], [2, 4, 5])]):
        answer = [{"role": "user", "content": f"Like this:\n\nanswer {index}"}]
        prefix = ChatTemplate(tokenizer).render(answer, add_generation_prompt=False)
        logprobs = backend.model(torch.tensor([prefix + ids])).logits[0].log_softmax(-1)
        expected += [float(logprobs[len(prefix) + place - 1, ids[place]].detach()) for place in places]
    assert found.batch.teacher_logprobs is not None
    assert found.batch.teacher_logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.batch.advantages.tolist() == pytest.approx([value + 1.0 for value in expected], abs=1e-5)
    assert [sequence.ids for sequence in found.batch.sequences] == [[5, 6, 7, 8], [5, 9, 10, 11, 12, 13]]


def test_incompatible_settings_are_rejected(make_teacher: Callable[..., SelfTeacher], backend: LocalBackend) -> None:
    with pytest.raises(ConfigError, match=r"task '0': its demonstration and conversation have \d+ tokens.*takes 9"):
        assemble(episodes(), CURRENT, step=0, temperature=1.0, teacher=make_teacher(9), scorer=backend)


def test_initial_weights_are_the_default_teacher() -> None:
    assert SDFT().needs_original
    assert not SDFT().needs_reference
    assert not CURRENT.needs_original


@pytest.mark.parametrize("task", [{}, {"demonstration": " "}, {"demonstration": None}, {"demonstration": 3}], ids=str)
def test_task_without_demonstration_is_reported(task: dict[str, Any]) -> None:
    data = Dataset([{"question": "a", "demonstration": "b"}, {"question": "c", **task}])
    with pytest.raises(ConfigError, match=r"train_dataset, row 1: algorithm\.demonstration='demonstration'"):
        check_demonstrations(SDFT(), data)
    check_demonstrations(SDFT(demonstration="question"), data)


def test_separate_teacher_is_rejected() -> None:
    config = load_config(["model.path=m", "algorithm.name=sdft", "teacher.path=other"])
    with pytest.raises(ConfigError, match=r"teacher\.path='other' would have no effect where the policy teaches"):
        check_teacher(config, SDFT())
