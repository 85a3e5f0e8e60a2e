"""Special features of models are computed by the workers as by the local backend, in updates too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.update import update_weights
from rllm.backends.verl.backend import VerlBackend
from rllm.trainer.config import load_config

from .batches import batch_for

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


# A bound of attention scores, which torch's own attention ignores; dropout; and a model without that attention.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
MODELS = {
    "gemma2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "attn_logit_softcapping": 1.0,
        "attention_dropout": 0.5,
        "initializer_range": 0.3,
        **HEADS,
    },
    "gpt_oss": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_dropout": 0.5,
        **HEADS,
    },
}


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Path:
    """A small random model of that kind, with the tokenizer of another."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(request.param, vocab_size=400, **MODELS[request.param]), attn_implementation="eager"
    )
    made.save_pretrained(tmp_path)
    for path in model_folder.iterdir():
        if "token" in path.name or path.name == "chat_template.jinja":
            shutil.copy(path, tmp_path)
    return tmp_path


def test_workers_compute_the_same_as_the_local_backend(cluster: None, model: Path) -> None:
    settings = [f"model.path={model}", "model.device=cpu", "optim.lr=1e-9"]
    local, verl = (
        kind.from_config(load_config([*settings, f"backend={name}"]))
        for kind, name in ((LocalBackend, "local"), (VerlBackend, "verl"))
    )
    try:
        batch = batch_for(GRPO())
        right = local.score(batch)
        for expected in (verl.score(batch), update_weights(verl, batch, GRPO()).logprobs):
            torch.testing.assert_close(expected, right, rtol=1e-4, atol=1e-4)
    finally:
        verl.close()
        local.close()
