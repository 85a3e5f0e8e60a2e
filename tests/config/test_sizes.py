"""Defaults, messages and a page of the docs from one table of models by size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rllm.config.sizes import (
    PAGE,
    TABLE,
    check_sizes,
    class_of,
    fitted_to_tasks,
    rate_in_words,
    size_in_words,
    size_of,
    sizes_in_words,
    trained_bytes,
    with_learning_rate,
)
from rllm.errors import ConfigError
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.settings import training_memory

ROOT = Path(__file__).parents[2]


def model_of(folder: Path, num_weights: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(num_weights, dtype=torch.uint8)}, folder / "model.safetensors")
    return folder


def test_documented_rates_equal_the_table() -> None:
    rows = re.findall(r"\| `(\S+)` \| `(\S+)` \| `(\S+)` \| `(\S+)` \|", (ROOT / PAGE).read_text())
    shown = [tuple(map(float, row)) for row in rows]
    assert shown == [(item.full, item.lora, item.sft, item.sft_lora) for item in TABLE]


def test_larger_models_learn_more_slowly_and_adapters_faster() -> None:
    for rates in zip(*((item.full, item.lora, item.sft, item.sft_lora) for item in TABLE), strict=True):
        assert list(rates) == sorted(rates, reverse=True)
    assert [item.up_to for item in TABLE] == sorted(item.up_to for item in TABLE)
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
def test_size_is_read_from_a_hub_id(name: str, expected: float | None) -> None:
    assert size_of(name) == expected


def test_size_of_an_adapter_is_that_of_its_base(tmp_path: Path) -> None:
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
def test_learning_rate_depends_on_size_adapter_and_kind_of_training(
    settings: list[str], demonstrates: bool, expected: float
) -> None:
    config = load_config(settings)
    config, origin = with_learning_rate(config, demonstrates=demonstrates)
    assert config.optim.lr == expected
    assert origin is not None
    [found] = rate_in_words(config, origin, demonstrates=demonstrates)
    assert found.startswith(f"optim.lr={expected:g}, by model size")


def test_learning_rate_of_the_user_is_kept(tmp_path: Path) -> None:
    config = load_config(["model.path=a/m-8B", "optim.lr=0.5"])
    assert with_learning_rate(config, demonstrates=False) == (config, None)


@pytest.mark.parametrize(
    ("lr", "expected"),
    [
        ("1e-5", ""),
        ("1e-7", ""),
        ("2e-5", "is 20 times the usual 1e-06"),
        ("1.666e-3", "is 1,670 times the usual 1e-06"),
        ("1e-10", "is 1/10,000 of the usual 1e-06"),
        ("5e-8", "is 1/20 of the usual 1e-06"),
    ],
)
def test_unusual_learning_rate_is_reported(lr: str, expected: str) -> None:
    config = load_config(["model.path=a/m-8B", f"optim.lr={lr}"])
    lines = rate_in_words(config, None, demonstrates=False)
    assert [expected in line for line in lines] == ([True] if expected else [])


def agent(word: str) -> float:
    return 1.0


def test_resumed_run_keeps_its_learning_rate(tmp_path: Path) -> None:
    settings = ["model.path=a/m-8B", f"run_dir={tmp_path / 'run'}"]
    tasks = [{"word": "fig"}]
    trainer = AgentTrainer(agent_run_func=agent, train_dataset=tasks, config=settings)
    assert trainer.rate_origin == "by model size: reinforcement learning of all weights, model of 8B weights"

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("optim:\n  lr: 0.125\n")
    resumed = AgentTrainer(agent_run_func=agent, train_dataset=tasks, config=settings, resume=True)
    assert (resumed.config.optim.lr, resumed.rate_origin) == (0.125, "as before the resume")
    other = AgentTrainer(agent_run_func=agent, train_dataset=tasks, config=[*settings, "optim.lr=1"], resume=True)
    assert (other.config.optim.lr, other.rate_origin) == (1.0, None)


def test_memory_estimate_is_a_sum(tmp_path: Path) -> None:
    full, adapter = (trained_bytes(1e9, itemsize=2, lora=lora) for lora in (False, True))
    assert (sum(full.values()), sum(adapter.values())) == (20e9, 2e9)
    assert sum(trained_bytes(1e9, itemsize=4).values()) == 16e9
    assert sum(trained_bytes(1e9, itemsize=2, offload=True).values()) == 4e9
    model = model_of(tmp_path / "model", 10**7)
    config = load_config([f"model.path={model}", "model.device=cpu"])
    found, saving = training_memory(config)
    assert found.startswith(
        "predicted peak of memory for training on cpu: 0.70 GB (0.04 GB weights, 0.08 GB AdamW, 0.50"
    )
    assert saving.startswith("what saves most: model.lora_rank=16 (0.62 GB)")
    few_bits = trained_bytes(1e9, itemsize=4, in_8_bits=True, of_embeddings=1e8)
    assert few_bits["AdamW"] == 0.8e9 + 0.9e9 * 2.04
    assert training_memory(load_config([f"model.path={model}", "backend=verl"])) == []
    assert training_memory(load_config(["model.path=a/unknown"])) == []


def weights(*shape: int) -> bytes:
    """Write a file of safetensors with one tensor in bfloat16, without its data."""
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.safetensors": weights(1000, 134_500), "b.safetensors": weights(12)}, "135M parameters"),
        ({"a.safetensors": weights(10, 100)}, "1K parameters"),
        ({"pytorch_model.bin": bytes(2_500_000)}, ""),
        ({"config.json": b"{}"}, ""),
        ({"a.safetensors": b"short"}, ""),
        ({"a.safetensors": b"long enough to hold a length, which it does not"}, ""),
        ({"a.safetensors": (5).to_bytes(8, "little") + b"nojson"}, ""),
        ({"a.safetensors": (3).to_bytes(8, "little") + b"[1]"}, ""),
    ],
)
def test_model_size_is_read_from_its_files(tmp_path: Path, files: dict[str, bytes], expected: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert size_in_words(str(tmp_path)) == expected


def in_words(config: TrainConfig, num_tasks: int) -> list[str]:
    return sizes_in_words(config, num_tasks, needs_greedy=False)


SIZES = ("tasks_per_step=32", "rollout.group_size=8")


def test_sizes_are_described() -> None:
    config = load_config([*SIZES, "optim.num_minibatches=2", "optim.num_epochs=2"])
    assert in_words(config, 1600) == [
        "32 tasks x 8 rollouts = 256 episodes a step, 4 updates of 128 episodes",
        "100 steps x 32 tasks = 2 times through the 1600 tasks",
    ]
    assert in_words(load_config(["num_steps=1000", "tasks_per_step=2"]), 2)[1].endswith(
        "= 1,000 times through the 2 tasks"
    )
    assert in_words(load_config(SIZES), 1600)[0] == "32 tasks x 8 rollouts = 256 episodes a step, 1 update"
    assert in_words(load_config(["tasks_per_step=1", "rollout.group_size=1", "num_steps=3"]), 1) == [
        "1 task x 1 rollout = 1 episode a step, 1 update",
        "3 steps x 1 task = 3 times through the 1 task",
    ]


def test_greedy_rollouts_are_counted() -> None:
    assert sizes_in_words(load_config(SIZES), 1600, needs_greedy=True)[:2] == [
        "32 tasks x 8 rollouts = 256 episodes a step, 1 update",
        "and 32 greedy rollouts to compare with, one for each task",
    ]


def test_counts_of_one_use_singular_forms() -> None:
    single = ["tasks_per_step=2", "rollout.group_size=1", "num_steps=1", "rollout.resample_rounds=1"]
    assert in_words(load_config([*single, "optim.num_minibatches=2"]), 1) == [
        "2 tasks x 1 rollout = 2 episodes a step, 2 updates of 1 episode",
        "1 step x 2 tasks = 2 times through the 1 task",
        "tasks whose rollouts all earn the same are replaced, at most once a step",
    ]
    assert in_words(load_config([*single, "tasks_per_step=4"]), 4)[1] == "1 step x 4 tasks = once through the 4 tasks"
    with pytest.raises(ConfigError, match=r"does not divide the 1 episode of a step, .*: use 1"):
        check_sizes(load_config(["tasks_per_step=1", "rollout.group_size=1", "optim.num_minibatches=2"]), 5)


def test_repeated_tasks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config([*SIZES, "optim.num_minibatches=4", "rollout.resample_rounds=2", "num_steps=1"])
    assert in_words(config, 20) == [
        "32 tasks x 8 rollouts = 256 episodes a step, 4 updates of 64 episodes",
        "1 step x 32 tasks = 1.6 times through the 20 tasks",
        "tasks whose rollouts all earn the same are replaced, at most 2 times a step",
    ]
    check_sizes(config, 20)
    assert "tasks_per_step=32 exceeds the 20 tasks" in caplog.text


@pytest.mark.parametrize(("asked", "num_tasks", "taken"), [([], 2, 2), ([], 40, 16), (["tasks_per_step=16"], 2, 16)])
def test_tasks_per_step_is_bounded_unless_set(asked: list[str], num_tasks: int, taken: int) -> None:
    config = load_config(load_config(asked))  # as a trainer does with a finished configuration
    assert fitted_to_tasks(config, num_tasks).tasks_per_step == taken


@pytest.mark.parametrize(("parts", "remedy"), [(9, "8"), (3, "2 or 4"), (7, "4 or 8")])
def test_indivisible_minibatches_are_rejected(parts: int, remedy: str) -> None:
    sizes = ["tasks_per_step=2", "rollout.group_size=4"]
    check_sizes(load_config([*sizes, "optim.num_minibatches=8"]), 5)
    with pytest.raises(ConfigError) as refused:
        check_sizes(load_config([*sizes, f"optim.num_minibatches={parts}"]), 5)
    assert str(refused.value) == (
        f"optim.num_minibatches={parts} does not divide the 8 episodes of a step, tasks_per_step=2 x rollout.group_size=4: use {remedy}"
    )


def test_critic_warmup_is_described(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["algorithm.name=ppo", "tasks_per_step=2", "num_steps=8", "critic.warmup_steps=7"])
    assert in_words(config, 2)[-1] == "in the first 7 steps only the critic is updated"
    check_sizes(config, 2)
    assert not caplog.records
    config.critic.warmup_steps = 8
    check_sizes(config, 2)
    assert "critic.warmup_steps=8 and num_steps=8" in caplog.text


def test_endless_critic_warmup_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    sizes = ["tasks_per_step=2", "num_steps=3", "optim.num_epochs=2"]
    check_sizes(load_config([*sizes, "optim.warmup_steps=6"]), 2)
    assert not caplog.records
    check_sizes(load_config([*sizes, "optim.warmup_steps=7"]), 2)
    message = "optim.warmup_steps=7 is more than the 6 updates of the run: the learning rate never reaches optim.lr"
    assert [record.getMessage() for record in caplog.records] == [message]
