from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, Llama4Config, LlavaConfig

from rllm.algorithms.batch import Batch
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.logprobs import body_of
from rllm.backends.local.policy import Policy, Trunk
from rllm.backends.lora import LoraSettings
from rllm.inference.local.loading import load_model

from .conftest import sequence_of

TEXT = {
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
LLAVA = LlavaConfig(
    text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
    vision_config={**IMAGES, "model_type": "pixtral"},
    image_token_index=399,
)
LLAMA4 = Llama4Config(
    text_config={**TEXT, "intermediate_size_mlp": 16, "num_local_experts": 2},
    vision_config={**IMAGES, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
)
"""`transformers` has this one as a language model, too: its text part, with other names."""
WHOLE = [
    pytest.param(LLAVA, id="llava"),
    pytest.param(
        LLAMA4,
        id="llama4",
        marks=pytest.mark.skipif(
            transformers.__version__.startswith("5.24."), reason="in transformers 5.24 Llama 4 fails without an image"
        ),
    ),
]

MakeFolder = Callable[[Any], Path]


@pytest.fixture
def folder_of(tmp_path: Path, tokenizer: Any) -> MakeFolder:
    def make(config: Any) -> Path:
        torch.manual_seed(0)
        folder = tmp_path / "whole"
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text("{}")
        return folder

    return make


@pytest.mark.parametrize("config", WHOLE)
def test_saved_weights_equal_the_loaded_ones(
    tmp_path: Path, folder_of: MakeFolder, make_backend: Callable[..., LocalBackend], config: Any
) -> None:
    folder, saved = folder_of(config), tmp_path / "saved"
    saved.mkdir()
    backend = make_backend(load_model(folder, device="cpu").model)
    backend.save(saved)
    before, after = (load_file(path / "model.safetensors") for path in (folder, saved))
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert AutoConfig.from_pretrained(saved).architectures == AutoConfig.from_pretrained(folder).architectures
    assert (saved / "preprocessor_config.json").is_file(), "servers do not start without it"
    shutil.rmtree(folder)
    backend.save(saved)


@pytest.mark.parametrize("config", WHOLE)
def test_text_logprobs_equal_those_of_the_whole_model(folder_of: MakeFolder, config: Any) -> None:
    folder = folder_of(config)
    whole = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = torch.randint(3, 300, (12,), generator=torch.Generator().manual_seed(0))
    expected = whole(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[3:, 0]
    model = load_model(folder, device="cpu").model
    batch = Batch.of([sequence_of(ids[:4].tolist(), ids[4:].tolist())])
    score = Policy.of(model, Trunk.of(body_of(model))).score(batch, 100)
    torch.testing.assert_close(score, expected.detach(), atol=1e-5, rtol=0)


def test_adapters_are_added_only_to_layers_used_for_text(
    folder_of: MakeFolder, make_backend: Callable[..., LocalBackend]
) -> None:
    backend = make_backend(load_model(folder_of(LLAVA), device="cpu").model, lora=LoraSettings(rank=2, alpha=4))
    trained = [name for name, weight in backend.model.named_parameters() if weight.requires_grad]
    assert len(trained) == 14, "two matrices for each of seven layers"
    assert all(name.startswith("model.language_model.") for name in trained)


def test_other_layers_are_frozen_and_shared_with_the_critic(
    folder_of: MakeFolder, make_backend: Callable[..., LocalBackend]
) -> None:
    loaded = load_model(folder_of(LLAVA), dtype="bfloat16", device="cpu")
    backend = make_backend(loaded.model)
    frozen = {id(weight) for name, weight in backend.model.named_parameters() if "language_model" not in name}
    frozen -= {id(weight) for weight in backend.model.get_output_embeddings().parameters()}
    assert frozen
    assert len(backend.optimizer._masters) == len(list(backend.model.parameters())) - len(frozen)
    assert frozen <= {id(weight) for weight in backend.critic._module.parameters()}
