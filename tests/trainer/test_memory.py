from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.trainer.checkup import training_bytes
from rllm.trainer.config import load_config
from rllm.trainer.settings import bytes_of_token, fitted_to_memory, predicted_memory, prompt_tokens

GB, CPU = 10**9, "model.device=cpu"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Sizes of 79 million weights."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6}
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "vocab_size": 1000, **heads}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return f"model.path={tmp_path}"


def test_memory_of_a_token_matches_a_hand_computed_value(model: str) -> None:
    of_layer = 6 * 768 + 3 * (768 + 2 * 384) + 2 * 2048  # 13,312
    assert bytes_of_token(load_config([model, CPU])) == 4 * 12 * of_layer == 638_976
    assert bytes_of_token(load_config([model, CPU, "model.dtype=bfloat16"])) == 2 * 12 * (of_layer + 3 * 768)
    recomputed = load_config([model, CPU, "model.gradient_checkpointing=true"])
    assert bytes_of_token(recomputed) == 4 * (12 * 768 * 3 // 2 + of_layer)


@pytest.mark.parametrize(
    ("memory", "asked", "taken"),
    [
        (25 * GB, [], 9 * 1024),  # 9,781 tokens fit into a quarter
        (100 * GB, [], 16384),
        (1 * GB, [], 1024),
        (25 * GB, ["optim.micro_batch_tokens=16384"], 16384),
        (25 * GB, ["backend=verl"], 16384),
        (25 * GB, ["model.path=Qwen/Qwen3-0.6B"], 16384),
    ],
)
def test_micro_batches_fit_memory_unless_set(model: str, memory: int, asked: list[str], taken: int) -> None:
    config = load_config([model, CPU, *asked])
    assert fitted_to_memory(config, memory).optim.micro_batch_tokens == taken


def write_header(model: str, number: int) -> None:
    """Write the header of a file of weights, from which their number is read."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [number], "data_offsets": [0, 0]}}).encode()
    path = Path(model.removeprefix("model.path=")) / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_prompt_length_is_that_of_the_longest_text() -> None:
    assert prompt_tokens([{"id": 7, "question": "abcd" * 10, "answer": "4"}, {"question": "ab"}]) == 24 + 10
    assert prompt_tokens([]) == 64


@pytest.mark.parametrize(
    ("prompt", "asked", "tokens"),
    [
        (10, ["rollout.max_tokens=50"], 494),  # as the weights: 4 * 79 million / 638,976
        (100, ["rollout.max_tokens=100"], 600),  # a sixth of it is the prompt
        (400, ["rollout.max_tokens=50"], 800),  # a whole group of 8
        (400, ["rollout.max_tokens=50", "optim.micro_batch_tokens=500"], 500),
        (400, ["rollout.max_tokens=2000", "optim.micro_batch_tokens=500"], 2400),  # a single sequence
    ],
)
def test_number_of_tokens_in_a_pass_is_predicted(model: str, prompt: int, asked: list[str], tokens: int) -> None:
    write_header(model, 79_000_000)
    found = predicted_memory(load_config([model, CPU, "rollout.group_size=8", *asked]), prompt)
    assert found is not None
    assert f"activations of {tokens:,} tokens" in found.updating


@pytest.mark.parametrize("offline", [True, False])
def test_hub_id_is_predicted_as_the_folder_in_the_cache(
    model: str, put_in_hub_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    write_header(model, 79_000_000)
    put_in_hub_cache(Path(model.removeprefix("model.path=")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    folder, hub_id = load_config([model, CPU]), load_config(["model.path=owner/name", CPU])
    assert predicted_memory(hub_id) == predicted_memory(folder)
    assert fitted_to_memory(hub_id, GB).optim.micro_batch_tokens == 1024
    assert training_bytes("owner/name") == 16 * 79_000_000


def test_recomputation_is_predicted_for_long_sequences(model: str) -> None:
    write_header(model, 79_000_000)
    asked = [model, CPU, "rollout.max_tokens=4000"]
    peaks = [predicted_memory(load_config([*asked, *more])) for more in ([], ["optim.micro_batch_tokens=1024"])]
    kept, again = (sum(each.updating.values()) for each in peaks if each)
    assert again < kept / 3
