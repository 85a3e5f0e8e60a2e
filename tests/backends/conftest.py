"""Tiny random models, and a backend over one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.backends.local.backend import LocalBackend
from rllm.backends.update import Schedule
from rllm.config.schema import OptimConfig
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedModel
from rllm.inference.local.model_forward import use_grouped_attention
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
LLAMA_SIZES: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["what is the price of an apple"] * 4, vocab_size=300)


@pytest.fixture(scope="session")
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """`make_model("Qwen3", seed=1)`: a random model of two layers and width 32, whose attention accepts a tree."""

    def make(family: str = "Qwen3", *, seed: int = 0, num_layers: int = 2, **options: Any) -> Any:
        torch.manual_seed(seed)
        if family == "Qwen3":
            model = new_model(tokenizer, TinyPolicyRecipe(num_layers=num_layers, seed=seed, **SIZES))
        elif family == "Mistral":
            model = MistralForCausalLM(MistralConfig(vocab_size=len(tokenizer), **LLAMA_SIZES, **options))
        else:
            model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **LLAMA_SIZES, **options))
        use_grouped_attention(model)
        return model.eval()

    return make


@pytest.fixture
def make_backend(
    tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., Any]
) -> Iterator[Callable[..., LocalBackend]]:
    """`make_backend(lr=1e-3, lora=LoraSettings(...))`: a backend, by default over a random model of one layer.

    All are closed after the test.
    """
    made: list[LocalBackend] = []

    def make(model: Any = None, **options: Any) -> LocalBackend:
        loaded = LoadedModel(model=model or make_model(num_layers=1), tokenizer=tokenizer, device=torch.device("cpu"))
        of_optimizer = {name: options.pop(name) for name in OptimConfig.model_fields.keys() & options.keys()}
        settings = OptimConfig(**of_optimizer)
        decay = {name: options.pop(name) for name in {"decay", "decay_steps"} & options.keys()}
        schedule = Schedule(lr=settings.rate, warmup_steps=settings.warmup_steps, **decay)
        made.append(LocalBackend(loaded, settings, schedule=schedule, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def in_float64(model: Any) -> Any:
    """Convert the model to float64, and replace custom norms, which would compute in float32."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                exact = torch.nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)
    return model.double()


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


def strengthen(backend: LocalBackend) -> None:
    """Give every layer a non-zero adapter, as if it had been trained."""
    with backend.inference.paused(), torch.no_grad():
        for name, weight in backend.model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    backend.publish()


def sequence_of(prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float] | None = None) -> TokenSequence:
    span = StepSpan(step_id="step", start=len(prompt), stop=len(prompt) + len(answer))
    return TokenSequence(ids=[*prompt, *answer], spans=[span], logprobs=list(logprobs or [-1.0] * len(answer)))


@pytest.fixture(scope="session")
def groups() -> Callable[..., Batch]:
    """`groups(3, 4)`: a batch of 3 prompts with 4 answers each, of random lengths and advantages."""

    def make(num_prompts: int = 3, num_answers: int = 4, *, seed: int = 0) -> Batch:
        random = torch.Generator().manual_seed(seed)

        def tokens(low: int, high: int) -> list[int]:
            length = int(torch.randint(low, high, (1,), generator=random))
            return torch.randint(3, 250, (length,), generator=random).tolist()

        system = tokens(20, 21)
        prompts = [system + tokens(5, 12) for _ in range(num_prompts)]
        batch = Batch.of([sequence_of(prompt, tokens(1, 9)) for prompt in prompts for _ in range(num_answers)])
        batch.advantages = torch.randn(len(batch), generator=random)[batch.sequence_of]
        return batch

    return make


def assert_rejects_damage(backend: LocalBackend, folder: Path, damage: Mapping[str, Callable[[Path], object]]) -> None:
    """Save a checkpoint, and assert that no damaged copy of it can be loaded."""
    (folder / "whole").mkdir()
    backend.save(folder / "whole")
    for name, do_damage in damage.items():
        copy = shutil.copytree(folder / "whole", folder / name)
        do_damage(copy)
        with pytest.raises(ConfigError, match="checkpoint="):
            backend.load(copy)
