"""Defaults, remarks and a page of the docs from one table of models by size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rllm.config.model_sizes import (
    PAGE,
    TABLE,
    class_of,
    markdown,
    rate_in_words,
    size_in_words,
    size_of,
    trained_bytes,
    with_learning_rate,
    with_rate_origin,
)
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.trainer.memory import training_memory

ROOT = Path(__file__).parents[2]


def model_of(folder: Path, num_weights: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(num_weights, dtype=torch.uint8)}, folder / "model.safetensors")
    return folder


def test_the_pages_tables_are_those_of_the_code() -> None:
    page = (ROOT / PAGE).read_text()
    shown = re.findall(r"<!-- table: \w+ -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert "\n".join(table.strip() + "\n" for table in shown) == "\n".join(markdown()) + "\n"


def test_larger_models_learn_more_slowly_and_adapters_and_demonstrations_faster() -> None:
    for rates in zip(*((item.full, item.lora, item.sft, item.sft_lora) for item in TABLE), strict=True):
        assert list(rates) == sorted(rates, reverse=True)
    assert all(item.full < item.lora <= 10.01 * item.full for item in TABLE)
    assert all(item.full < item.sft < item.sft_lora for item in TABLE)
    assert [item.up_to for item in TABLE] == sorted(item.up_to for item in TABLE)
    assert all(class_of(item.typical) is item for item in TABLE)
    assert class_of(7e10) is TABLE[-1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", 6e8),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 1.35e8),
        ("Qwen/Qwen3-30B-A3B", 3e10),
        ("mistralai/Mixtral-8x7B-v0.1", 5.6e10),
        ("EleutherAI/pythia-1.4b", 1.4e9),
        ("openai-community/gpt2", None),
        ("models/b2m", None),
    ],
)
def test_a_hub_id_states_its_size(name: str, expected: float | None) -> None:
    assert size_of(name) == expected


def test_a_folder_is_counted_whatever_its_name_and_an_adapter_has_the_size_of_its_base(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model-8B", 1000)
    assert size_of(str(folder)) == 1000
    adapter = model_of(tmp_path / "adapter", 10)
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{folder}"}}')
    assert size_of(str(adapter)) == 1000
    (folder / "model.safetensors").write_bytes(b"\xff" * 16)
    assert size_of(str(folder)) == 8e9


@pytest.mark.parametrize(
    ("settings", "demonstrates", "expected"),
    [
        (["model.path=a/m-4M"], False, 3e-4),
        (["model.path=a/m-135M"], False, 2e-5),
        (["model.path=a/m-135M", "model.lora_rank=8"], False, 2e-4),
        (["model.path=a/m-135M"], True, 1e-4),
        (["model.path=a/m-8B"], False, 1e-6),
        (["model.path=a/m-8B", "model.lora_rank=8"], False, 1e-5),
        (["model.path=a/m-8B", "model.lora_rank=8"], True, 1e-4),
        (["model.path=a/unknown"], False, 1e-6),
        (["model.path=a/unknown"], True, 1e-5),
    ],
)
def test_rate_by_size_adapter_and_training(settings: list[str], demonstrates: bool, expected: float) -> None:
    config = load_config(settings)
    config, origin = with_learning_rate(config, demonstrates=demonstrates)
    assert config.optim.lr == expected
    assert origin is not None
    [told] = rate_in_words(config, origin, demonstrates=demonstrates)
    assert told.startswith(f"optim.lr={expected:g}, by model size")


def test_a_rate_of_the_users_stays(tmp_path: Path) -> None:
    config = load_config(["model.path=a/m-8B", "optim.lr=0.5"])
    assert with_learning_rate(config, demonstrates=False) == (config, None)
    assert with_rate_origin("optim:\n  lr: 0.5\n", None) == "optim:\n  lr: 0.5\n"


@pytest.mark.parametrize(
    ("lr", "told"),
    [
        ("1e-5", ""),
        ("1e-7", ""),
        ("2e-5", "is 20 times the usual 1e-06"),
        ("1.666e-3", "is 1,670 times the usual 1e-06"),
        ("1e-10", "is 1/10,000 of the usual 1e-06"),
        ("5e-8", "is 1/20 of the usual 1e-06"),
    ],
)
def test_a_rate_that_is_far_from_the_usual_one_is_remarked_on(lr: str, told: str) -> None:
    config = load_config(["model.path=a/m-8B", f"optim.lr={lr}"])
    lines = rate_in_words(config, None, demonstrates=False)
    assert [told in line for line in lines] == ([True] if told else [])


def agent(word: str) -> float:
    return 1.0


def test_a_run_that_is_resumed_keeps_its_rate(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", 1000)
    settings = [f"model.path={model}", f"run_dir={tmp_path / 'run'}"]
    tasks = [{"word": "fig"}]
    trainer = AgentTrainer(agent_run_func=agent, train_dataset=tasks, config=settings)
    assert trainer.rate_origin == "by model size: reinforcement learning of all weights, model of 1,000 weights"
    text = with_rate_origin("critic:\n  lr: 1.0e-05\noptim:\n  lr: 0.0003\n", trainer.rate_origin)
    assert text.endswith(f"\noptim:\n  lr: 0.0003  # {trainer.rate_origin}\n")
    assert load_config_text(tmp_path, text) == 0.0003

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("0.0003", "0.125"))
    resumed = AgentTrainer(agent_run_func=agent, train_dataset=tasks, config=settings, resume=True)
    assert (resumed.config.optim.lr, resumed.rate_origin) == (0.125, trainer.rate_origin)
    other = AgentTrainer(agent_run_func=agent, train_dataset=tasks, config=[*settings, "optim.lr=1"], resume=True)
    assert (other.config.optim.lr, other.rate_origin) == (1.0, None)


def load_config_text(folder: Path, text: str) -> float | None:
    (folder / "stored.yaml").write_text(text)
    return load_config(folder / "stored.yaml").optim.lr


def test_memory_is_added_up(tmp_path: Path) -> None:
    full, adapter = (trained_bytes(1e9, itemsize=2, lora=lora) for lora in (False, True))
    assert (sum(full.values()), sum(adapter.values())) == (20e9, 2e9)
    assert sum(trained_bytes(1e9, itemsize=4).values()) == 16e9
    assert sum(trained_bytes(1e9, itemsize=2, offload=True).values()) == 4e9
    model = model_of(tmp_path / "model", 10**7)
    config = load_config([f"model.path={model}", "model.device=cpu"])
    [told] = training_memory(config)
    assert told.startswith("predicted memory for training on cpu: 0.16 GB (0.04 GB weights, 0.04 GB gradients, 0.08 GB")
    assert training_memory(load_config([f"model.path={model}", "backend=verl"])) == []
    assert training_memory(load_config(["model.path=a/unknown"])) == []


def weights(*shape: int) -> bytes:
    """A file of safetensors with one tensor in bfloat16, without its numbers."""
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.safetensors": weights(1000, 134_500), "b.safetensors": weights(12)}, "135M parameters, {size} bytes"),
        ({"a.safetensors": weights(10, 100)}, "1K parameters, {size} bytes"),
        ({"pytorch_model.bin": bytes(2_500_000)}, "2.5 MB"),
        ({"adapter_config.json": b"", "a.safetensors": weights(999)}, "999 parameters of an adapter, {size} bytes"),
        ({"config.json": b"{}"}, ""),
        ({"a.safetensors": b"short"}, ""),
        ({"a.safetensors": b"long enough to hold a length, which it does not"}, ""),
        ({"a.safetensors": (5).to_bytes(8, "little") + b"nojson"}, ""),
        ({"a.safetensors": (3).to_bytes(8, "little") + b"[1]"}, ""),
    ],
)
def test_the_size_of_a_model_is_read_from_its_files(tmp_path: Path, files: dict[str, bytes], told: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert size_in_words(str(tmp_path)) == told.format(size=sum(map(len, files.values())))
