"""The embedded backend on a device that rejects tensors of other devices, as a GPU does.

Kernels of a GPU, their rounding and their memory are tested only with `RLLM_TEST_DEVICE=cuda`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import torch.nn.attention.flex_attention
from torch import Tensor
from transformers import AutoModelForCausalLM

from rllm.backends.local import policy as policy_module
from rllm.backends.local.forward import whole_tree_states
from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.loading import load_model
from rllm.inference.local.model_forward import plain_logits
from rllm.inference.local.slot_decoder import SlotDecoder
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.agent_trainer import AgentTrainer

# FlexAttention requires heads of at least 16 numbers.
RECIPE = TinyPolicyRecipe(hidden_size=64, num_layers=2, intermediate_size=64, num_heads=4, num_key_value_heads=2)
TASKS = [{"question": f"How many {item} are left?"} for item in ("figs", "limes", "plums")]
pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit.script_method:DeprecationWarning"
    ),  # raised by the compiler for GPUs
]
WAYS = {
    "group": ["algorithm.entropy_coef=0.01", "algorithm.correction=truncate"],
    "bfloat16": ["model.dtype=bfloat16", "algorithm.kl_coef=0.1"],
    "autocast": ["optim.autocast=true"],
    "critic": ["algorithm.name=ppo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    "critic in main memory": ["algorithm.name=ppo", "optim.offload=true"],
    "reference in main memory": ["algorithm.kl_coef=0.1", "model.reference_offload=true"],
    "adapter": ["model.lora_rank=2", "algorithm.kl_coef=0.1", "model.gradient_checkpointing=true"],
    "recomputed": ["model.gradient_checkpointing=true"],
    "greedy baseline": ["algorithm.name=remax"],
    "sequence ratio": ["algorithm.name=gspo", "optim.num_minibatches=2", "optim.num_epochs=2"],
    "many parts": ["algorithm.name=dapo", "algorithm.correction=mask", "optim.micro_batch_tokens=64"],
    "overlapped": ["rollout.max_staleness=1", "num_steps=3"],
    "restricted": ["eval.every=1", "eval.top_k=5", "eval.top_p=0.9", "rollout.temperature=0.7"],
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = train_tokenizer([task["question"] for task in TASKS] * 4, vocab_size=300)
    new_model(tokenizer, RECIPE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def agent(question: str) -> float:
    """Take three turns, so that prompts begin with cached tokens."""
    messages: list[Any] = [{"role": "user", "content": question}]
    expected_message = ""
    with openai.OpenAI() as client:
        for _ in range(3):
            response = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            answer = response.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
            expected_message += answer
    return sum(letter < "n" for letter in expected_message) / max(len(expected_message), 1)


def trained(policy: Path, run_dir: Path, device: str, *overrides: str, resume: bool = False) -> dict[str, Any]:
    """Return the metrics of the last step, and `weights`."""
    config = [
        f"model.path={policy}",
        f"model.device={device}",
        "model.dtype=float32",
        f"run_dir={run_dir}",
        *([] if any("num_steps" in override for override in overrides) else ["num_steps=2"]),
        "tasks_per_step=2",
        "rollout.group_size=4",
        "optim.lr=1e-3",
        "trackers=[jsonl]",
        *overrides,
    ]
    held_out = TASKS if "eval.every=1" in overrides else None
    with_adapter = any("lora" in override for override in overrides)
    trainer = AgentTrainer(
        agent_run_func=agent, train_dataset=TASKS, val_dataset=held_out, config=config, resume=resume
    )
    checkpoint = trainer.train().checkpoint
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    [*_, metrics] = (line for line in lines if "policy/grad_norm" in line)
    return metrics if with_adapter else {**metrics, "weights": weights_in(checkpoint)}


def weights_in(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_tensors_of_two_devices_cannot_be_mixed(device: str) -> None:
    there, here = torch.ones(3, 4, device=device), torch.ones(4, 3)
    assert there.device.type == device
    with pytest.raises(RuntimeError, match="is on cpu"):
        there @ here
    with pytest.raises(RuntimeError, match="same device"):
        there + here.T
    assert torch.equal((there @ here.to(device)).cpu(), torch.full((3, 3), 4.0))


@pytest.mark.parametrize("way", WAYS)
def test_training_improves_the_policy(policy: Path, tmp_path: Path, device: str, way: str) -> None:
    metrics = trained(policy, tmp_path / "run", device, *WAYS[way])
    assert math.isfinite(metrics["policy/grad_norm"])
    assert metrics["policy/grad_norm"] > 0
    if way != "overlapped":
        assert metrics["policy/sampler_gap_mean"] < (0.05 if way in ("bfloat16", "autocast") else 1e-4)
    if "weights" in metrics:
        assert not torch.equal(metrics["weights"], weights_in(policy))


@pytest.mark.parametrize("way", [[], ["model.dtype=bfloat16"], ["model.gradient_checkpointing=true"]], ids=str)
def test_tree_runs_in_a_single_pass(
    policy: Path, tmp_path: Path, device: str, way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    in_rows = trained(policy, tmp_path / "rows", device, *way, "num_steps=1")
    monkeypatch.setattr(policy_module, "choose_forward", lambda _: whole_tree_states)
    metrics = trained(policy, tmp_path / "run", device, *way, "num_steps=1")
    precise = {"rel": 0.1} if "model.dtype=bfloat16" in way else {"rel": 1e-4}
    assert metrics["policy/grad_norm"] == pytest.approx(in_rows["policy/grad_norm"], **precise)


def test_resumed_run_continues_exactly(policy: Path, tmp_path: Path, device: str) -> None:
    if device == "cuda":
        pytest.skip("a GPU's kernels sum in an order that varies")
    ppo = ["algorithm.name=ppo", "algorithm.kl_coef=0.1", "model.dtype=bfloat16", "save_every=1"]
    whole = trained(policy, tmp_path / "whole", device, *ppo)
    trained(policy, tmp_path / "parts", device, *ppo, "num_steps=1")
    resumed = trained(policy, tmp_path / "parts", device, *ppo, resume=True)
    assert torch.equal(resumed["weights"], whole["weights"])


@pytest.mark.parametrize("reads_back", [False, True])
def test_recorded_decode_steps_match_the_model_logits(policy: Path, device: str, reads_back: bool) -> None:
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    model = load_model(str(policy), dtype="float32", device=device).model
    if reads_back:  # a CUDA graph cannot read values back
        model.model.norm.register_forward_hook(lambda _module, _inputs, states: states * float(states[0, 0, 0] < 1e9))
    decoder = choose_decoder(model, max_sequences=40, max_length=512, max_bytes=1 << 26)
    assert isinstance(decoder, SlotDecoder)
    vocabulary = model.get_input_embeddings().num_embeddings
    sequences = [[(7 * row + token) % vocabulary for token in range(250 + row % 5)] for row in range(20)]
    with torch.no_grad():
        sequences = [sequences[added.index] for added in decoder.add(sequences)]
        for step in range(12):
            if step == 6:
                decoder.remove({number: sequences[number] for number in range(9)})
                del sequences[:9]
            logits = decoder.step([sequence[-1] for sequence in sequences])
            expected = torch.cat([plain_logits(model, sequence) for sequence in sequences])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            for row, sequence in enumerate(sequences):
                sequence.append((sequence[-1] * 5 + row) % vocabulary)
    assert bool(decoder._graphs._recorded) is not reads_back
    assert torch.rand(2, device=device).isfinite().all()
