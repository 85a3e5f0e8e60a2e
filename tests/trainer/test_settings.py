"""No dead settings: every key of the configuration is changed once, with a visible effect on the run."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from torch import Tensor

import rllm
from rllm.backends.local.backend import LocalBackend
from rllm.errors import ConfigError, InferenceError
from rllm.inference.local.loading import load_tokenizer
from rllm.inference.local.quantized import QuantizedLinear
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.tracking.about import settings_of
from rllm.tracking.console import ConsoleTracker
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.settings import check_fit
from rllm.types import Episode, TerminationReason, Trajectory

from ..ports import free_port
from .conftest import Run, RunTrainer, ScriptedBackend, ask, merged


class OtherBackend(ScriptedBackend):
    """Backend of another name."""


class FileTracker(ConsoleTracker):
    """Tracker that creates a file."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        (run_dir / "noted").touch()


PORT = free_port()


def train_params(run: Run) -> list[dict[str, Any]]:
    return [params for params in run.params if params["temperature"] != 0.5]


def eval_params(run: Run) -> list[dict[str, Any]]:
    return [params for params in run.params if params["temperature"] == 0.5]


def group_size(run: Run) -> int:
    return len(train_params(run)) // (2 * 2)


def eval_steps(run: Run) -> list[int]:
    return [line["step"] for line in run.lines if "eval/accuracy" in line]


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.trainer.run_dir / "checkpoints").iterdir())


def slow(word: str, base_url: str) -> float:
    ask(base_url, word)
    if word == "kiwi":
        time.sleep(4.0 if ScriptedBackend.latest.config.rollout.timeout_s < 4.0 else 0.1)
    return float(len(base_url) % 2)


def failing_once(word: str, base_url: str) -> float:
    if word == "fig" and base_url not in _tried:
        _tried.append(base_url)
        if len(_tried) == 1:
            raise InferenceError("try again", status_code=503)
    ask(base_url, word)
    return 1.0


def alike(word: str, base_url: str) -> float:
    ask(base_url, word)
    return 1.0


def cut_off(word: str, base_url: str) -> float:
    ask(base_url, word, max_tokens=1)
    return float(len(base_url) % 2)


def with_a_title(word: str, base_url: str) -> float:
    ask(base_url, word)
    ask(base_url, word, tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
    return float(len(base_url) % 2)


def out_of_turns(word: str, base_url: str) -> Any:
    ask(base_url, word)
    return Episode(trajectories=[Trajectory(reward=1.0)], termination_reason=TerminationReason.MAX_TURNS_EXCEEDED)


def in_parts(word: str, base_url: str) -> dict[str, float]:
    ask(base_url, word)
    return {"right": 1.0, "short": 1.0}


_tried: list[str] = []


def in_two_turns(word: str, base_url: str) -> float:
    answer = ask(base_url, word)
    text = [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]
    ask(base_url, [*text, {"role": "user", "content": "Sure?"}])
    return float(len(base_url) % 2)


COMMON: dict[str, Any] = {
    "num_steps": 2,
    "save_every": 1,
    "eval": {"every": 0},
    "rollout": {"num_retries": 0},
}
EVALUATED: dict[str, Any] = {**COMMON, "eval": {"every": 0, "temperature": 0.5}}
"""Settings with another temperature in evaluations, by which their requests are recognized."""


def dropped(reason: str) -> Callable[[Run], float]:
    return lambda run: sum(line.get(f"dropped/{reason}", 0) for line in run.lines)


def largest_advantage(run: Run) -> float:
    """Return the largest advantage of the rewards 1, 0 and 1."""
    batches = run.backend.batches
    return round(float(batches[0].advantages.abs().max()), 3) if batches else 0.0


Observe = Callable[[Run], Any]
SEEN: dict[str, tuple[Any, Observe, Any]] = {
    # key: (value, the inspected property, its expected value), different without the setting
    "run_dir": ("other", lambda run: run.trainer.run_dir.name, "other"),
    "seed": (4, lambda run: set(run.words[:6]), {"kiwi", "papaya"}),
    "num_steps": (3, lambda run: len(run.backend.batches), 3),
    "num_epochs": (2, lambda run: len(run.backend.batches), 4),
    "store": ("other.db", lambda run: Path("other.db").exists(), True),
    "tasks_per_step": (4, lambda run: len(train_params(run)), 2 * 4 * 3),
    "save_every": (0, lambda run: run.backend.saved_at, [2]),
    "keep_checkpoints": (1, checkpoints, ["step-000002"]),
    "keep_batches": (
        1,
        lambda run: [path.name for path in (run.trainer.run_dir / "batches").iterdir()],
        ["step-000002.json"],
    ),
    "keep_best": ("eval/reward", lambda run: run.result and run.result.best is not None, True),
    "backend": (f"{__name__}:OtherBackend", lambda run: type(run.backend).__name__, "OtherBackend"),
    "trackers": ([f"{__name__}:FileTracker"], lambda run: (run.trainer.run_dir / "noted").exists(), True),
    "log_samples": (1, lambda run: settings_of(run.trainer.run_dir)["log_samples"], 1),
    "project": ("other", lambda run: settings_of(run.trainer.run_dir)["project"], "other"),
    "rollout.group_size": (2, group_size, 2),
    "rollout.temperature": (0.7, lambda run: {params["temperature"] for params in train_params(run)}, {0.7}),
    "rollout.max_tokens": (5, lambda run: {params.get("max_tokens") for params in train_params(run)}, {5}),
    "rollout.max_concurrent": (1, lambda run: run.backend.inference.most_live, 1),
    "rollout.max_staleness": (1, lambda run: run.backend.algorithms[0].correction, "truncate"),
    "rollout.timeout_s": (3.0, lambda run: sum(line.get("rollout/num_failed", 0) for line in run.lines), 3),
    "rollout.side_calls": (True, dropped("side_call"), 0),
    "rollout.num_retries": (1, lambda run: sum(line.get("rollout/num_failed", 0) for line in run.lines), 0),
    "eval.every": (1, eval_steps, [0, 1, 2]),
    "eval.num_rollouts": (3, lambda run: len(eval_params(run)), 2 * 2 * 3),
    "eval.at_start": (False, eval_steps, [2]),
    "eval.top_p": (0.75, lambda run: {params.get("top_p") for params in eval_params(run)}, {0.75}),
    "eval.top_k": (7, lambda run: {params.get("top_k") for params in eval_params(run)}, {7}),
    "eval.temperature": (0.25, lambda run: {params["temperature"] for params in run.params}, {1.0, 0.25}),
    "rollout.resample_rounds": (1, lambda run: len(run.words), 2 * (2 + 2) * 3),
    "filters.truncated": (True, dropped("truncated"), 12),
    "filters.ended_by": (["max_turns_exceeded"], dropped("max_turns_exceeded"), 12),
    "roles.*.trainable": (False, largest_advantage, 0.0),
    "roles.*.weight": (2.0, largest_advantage, 2.828),
    "reward.weights": ({"short": 0.5}, lambda run: run.lines[0]["rollout/reward"], 1.5),
    "model.path": ("other", lambda run: run.backend.config.model.path, "other"),
    "gateway.host": ("localhost", lambda run: run.urls[0].split(":")[1], "//localhost"),
    "gateway.port": (PORT, lambda run: run.urls[0].split("/")[2], f"127.0.0.1:{PORT}"),
    "gateway.exact_turns": (False, lambda run: any("prompt_token_ids" in params for params in run.params), False),
    "algorithm": (
        {"name": "grpo", "clip_high": 0.9, "normalize_std": False},
        lambda run: [getattr(run.backend.algorithms[0], name) for name in ("clip_high", "normalize_std")],
        [0.9, False],
    ),
}
AGENTS = {
    "reward.weights": in_parts,
    "rollout.timeout_s": slow,
    "rollout.num_retries": failing_once,
    "gateway.exact_turns": in_two_turns,
    "rollout.resample_rounds": alike,
    "filters.truncated": cut_off,
    "rollout.side_calls": with_a_title,
    "filters.ended_by": out_of_turns,
}


def adapted(backend: LocalBackend) -> dict[str, Tensor]:
    """Return the adapter's first matrices, by the name of the layer."""
    named = backend.model.named_parameters()
    return {name.split(".")[-4]: weight for name, weight in named if ".lora_A." in name}


def is_quantized(layer: Any) -> bool:
    return isinstance(layer, QuantizedLinear)


BUILT: dict[str, tuple[Any, Callable[[LocalBackend], Any], Any]] = {
    # the same for the arguments of the local backend
    "model.dtype": ("bfloat16", lambda backend: str(backend.model.dtype), "torch.bfloat16"),
    "model.device": ("cpu:0", lambda backend: str(backend.device), "cpu:0"),
    "model.tool_prompt": ("hermes", lambda backend: "rllm tool prompt" in backend.inference.template.text, True),
    "model.max_length": (99, lambda backend: backend.inference.max_length, 99),
    "model.lora_rank": (3, lambda backend: {matrix.shape[0] for matrix in adapted(backend).values()}, {3}),
    "model.lora_alpha": (6.0, lambda backend: backend.model.model.layers[0].mlp.up_proj.scaling["default"], 3.0),
    "model.lora_targets": (["q_proj"], lambda backend: set(adapted(backend)), {"q_proj"}),
    "model.quantize": ("int8", lambda backend: any(map(is_quantized, backend.model.modules())), True),
    "model.gradient_checkpointing": (True, lambda backend: backend.policy.trunk.recompute, True),
    "model.reference_offload": (True, lambda backend: getattr(backend.reference, "offload", False), True),
    **{
        f"optim.{name}": (value, lambda backend, name=name: getattr(backend.settings, name), value)
        for name, value in {
            "lr": 0.5,
            "warmup_steps": 7,
            "weight_decay": 0.25,
            "beta1": 0.5,
            "beta2": 0.75,
            "max_grad_norm": 3.0,
            "num_minibatches": 5,
            "num_epochs": 6,
            "micro_batch_tokens": 77,
            "autocast": True,
            "offload": True,
        }.items()
    },
    **{
        f"critic.{name}": (value, lambda backend, name=name: getattr(backend.critic_settings, name), value)
        for name, value in {"lr": 0.5, "max_grad_norm": 3.0, "warmup_steps": 7}.items()
    },
}
TOGETHER_WITH = {
    **{f"model.{name}": "model.lora_rank=2" for name in ("lora_alpha", "lora_targets", "quantize")},
    "model.reference_offload": "algorithm.kl_coef=0.1",
    **{f"critic.{name}": "algorithm.name=ppo" for name in ("lr", "max_grad_norm", "warmup_steps")},
}


ON_RAY = "../verl/test_ray_training.py::test_project_trains_on_other_nodes_as_locally"
SERVED = "../backends/test_server_launch.py::test_every_setting_reaches_the_server"
ELSEWHERE = {
    "data.weights": "test_sampling_of_runs.py::test_several_datasets_have_their_shares_and_metrics",
    "data.replay": "test_replay.py::test_batch_contains_a_share_of_earlier_groups",
    "data.replay_steps": "test_replay.py::test_groups_are_replayed_while_they_are_recent",
    "data.sampling": "test_sampling_of_runs.py::test_resumed_run_samples_like_the_uninterrupted_one",
    # settings with a separate test
    "model.tool_parser": "test_settings.py::test_invalid_value_is_rejected",
    "model.chat_template": "test_settings.py::test_chosen_template_is_kept_in_checkpoints",
    "optim.name": "../pretrained/test_quantized.py::test_8_bit_adamw_steps_are_close_to_those_of_adamw",
    "optim.schedule": "test_settings.py::test_schedule_counts_the_updates_of_the_run",
    **{
        f"sandbox.{name}": "../tasks/test_rollouts.py::test_sandbox_limits_come_from_settings_unless_the_name_sets_them"
        for name in ("cpus", "memory_mb", "disk_mb")
    },
    **{
        f"sandbox.{name}": "../tasks/test_rollouts.py::test_sandboxes_are_limited_by_a_pool"
        for name in ("concurrency", "warm")
    },
    "sandbox.backend": "../tasks/test_rollouts.py::test_sandbox_settings_without_sandboxes_are_rejected",
    "reward.timeout_s": "test_rewards.py::test_reward_function_has_a_deadline",
    "gateway.otel": "test_otel.py::test_rollouts_of_a_run_and_their_calls_are_traced",
    "rollout.max_steps": "test_rollout_sources.py::test_max_steps_limits_agents_in_environments",
    "sft.train_on": "test_demonstrations.py::test_only_answers_are_trained",
    "sft.tokenize_method": "test_demonstrations.py::test_only_answers_are_trained",
    "sft.reward_threshold": "test_agent_sft_trainer.py::test_best_rollouts_are_trained_token_for_token",
    "sft.best_per_task": "test_agent_sft_trainer.py::test_best_rollouts_are_trained_token_for_token",
    "model.engine": "../backends/test_server_launch.py::test_minimal_settings_start_a_server",
    "vllm.command": "../backends/test_server_launch.py::test_minimal_settings_start_a_server",
    "vllm.url": "../backends/test_server_launch.py::test_running_server_is_joined",
    "vllm.largest_gap": "../backends/test_server_launch.py::test_allowed_gap_depends_on_the_dtype_unless_set",
    **{
        f"vllm.{name}": SERVED
        for name in (
            *("port", "devices", "dtype", "gpu_memory", "reasoning_parser", "args"),
            *("sleep", "start_timeout_s", "max_restarts", "sync_dir"),
        )
    },
    "rollout.runner": ON_RAY,
    "ray.address": "test_rollouts.py::test_cluster_address_applies_to_verl",
    "ray.num_actors": "../verl/test_ray_runner.py::test_number_of_processes_and_concurrency_are_configurable",
    "ray.concurrency": "../verl/test_ray_runner.py::test_number_of_processes_and_concurrency_are_configurable",
    "ray.cpus_per_actor": "../verl/test_ray_runner.py::test_failed_start_error_names_the_node_and_the_remedy",
    "ray.start_timeout_s": "../verl/test_ray_runner.py::test_failed_start_error_names_the_node_and_the_remedy",
    "ray.working_dir": ON_RAY,
    "verl.workers_per_node": "../backends/verl/test_settings.py::test_cluster_resources_of_a_run",
    "verl.num_nodes": "../backends/verl/test_settings.py::test_cluster_resources_of_a_run",
    "verl.policy_loss": "../backends/verl/test_settings.py::test_settings_map_to_verl_keys",
    "verl.overrides": "../backends/verl/test_settings.py::test_verl_overrides_are_passed_on",
    "verl.timeout_s": "../verl/test_workers.py::test_worker_timeout_is_reported",
    "teacher.path": "test_teacher.py::test_local_model_scores_the_exact_tokens",
    "teacher.url": "test_teacher.py::test_teacher_settings_require_each_other",
    "teacher.align": "test_text_teacher.py::test_other_vocabulary_requires_alignment_by_text",
}
READ = {f"teacher.{name}" for name in ("dtype", "device", "model", "max_concurrent", "timeout_s", "num_retries")}
"""Settings passed on to a part that tests them itself; here, that they are read."""


def leaf_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, item in model.model_fields.items():
        kind, named_by_user = item.annotation, get_origin(item.annotation) is dict
        if named_by_user:
            kind = get_args(kind)[1]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaf_keys(kind, f"{prefix}{name}.{'*.' if named_by_user else ''}")
        else:
            yield prefix + name


def test_every_setting_has_a_test() -> None:
    assert sorted(leaf_keys(TrainConfig)) == sorted([*SEEN, *BUILT, *ELSEWHERE, *READ])


@pytest.mark.parametrize("key", ELSEWHERE)
def test_tests_of_settings_elsewhere_exist(key: str) -> None:
    file, _, name = ELSEWHERE[key].partition("::")
    source = (Path(__file__).parent / file).read_text()
    assert f"def {name}(" in source
    assert key.rpartition(".")[2] in source


def test_settings_that_are_passed_on_are_read() -> None:
    package = Path(rllm.__file__).parent
    trees = [ast.parse(path.read_text()) for path in (package / "trainer").rglob("*.py")]
    read = {ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert read >= READ


@pytest.mark.parametrize("key", [key for key in leaf_keys(TrainConfig) if key.startswith(("data.", "filters."))])
def test_selection_of_rollouts_has_no_effect_on_demonstrations(key: str) -> None:
    section, name = key.split(".")
    config = load_config(["algorithm.name=sft", "rollout.group_size=1"])
    changed = type(getattr(config, section)).model_construct(**{name: "other"})
    with pytest.raises(ConfigError, match=rf"{key}='other' would have no effect on demonstrations"):
        check_fit(config.model_copy(update={section: changed}), demonstrates=True)


def nested(key: str, value: Any) -> dict[str, Any]:
    key = key.replace("*", "agent")
    *sections, last = key.split(".")
    config = {last: value}
    for section in reversed(sections):
        config = {section: config}
    return config


_defaults: dict[tuple[Any, bool], Run] = {}
"""The runs without any of these settings, by their agent and whether they are evaluated."""


@pytest.mark.slow
@pytest.mark.parametrize("key", SEEN)
@pytest.mark.parametrize("is_set", [False, True], ids=["default", "set"])
def test_setting_changes_the_run(
    run_trainer: RunTrainer, key: str, is_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _tried.clear()
    value, observe, expected = SEEN[key]
    agent, val = AGENTS.get(key), key.startswith(("eval.", "keep_best"))
    if not is_set and (agent, val) in _defaults:
        run = _defaults[agent, val]
    else:
        run = run_trainer(
            merged(EVALUATED if val else COMMON, nested(key, value) if is_set else {}), agent=agent, val=val
        )
    if not is_set:
        _defaults[agent, val] = run
    assert (observe(run) == expected) is is_set


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["a fig"], vocab_size=300)
    recipe = TinyPolicyRecipe(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32)
    new_model(tokenizer, recipe).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@lru_cache(maxsize=2)  # most are compared with the same one; each maps more than a gigabyte
def built(folder: Path, *overrides: str) -> LocalBackend:
    backend = LocalBackend.from_config(load_config([f"model.path={folder}", *overrides]))
    backend.close()
    return backend


@pytest.mark.slow
@pytest.mark.parametrize("key", BUILT)
def test_setting_changes_the_backend(model_folder: Path, key: str) -> None:
    _, observe, expected = BUILT[key]
    others = [TOGETHER_WITH[key]] if key in TOGETHER_WITH else []
    section = key.partition(".")[0]
    # Those of `optim` and of `critic` do not influence each other, so all of a section are set at once.
    changed = [key] if section == "model" else [name for name in BUILT if name.startswith(section)]
    assert observe(built(model_folder, *others)) != expected
    assert observe(built(model_folder, *others, *(f"{name}={BUILT[name][0]}" for name in changed))) == expected


def test_schedule_counts_the_updates_of_the_run(model_folder: Path) -> None:
    updates = ("num_steps=10", "optim.num_epochs=2", "optim.num_minibatches=3")
    assert built(model_folder, *updates, "optim.schedule=constant").schedule.decay_steps is None
    for schedule in ("linear", "cosine"):
        settings = built(model_folder, *updates, f"optim.schedule={schedule}").schedule
        assert (settings.decay, settings.decay_steps) == (schedule, 60)
    waiting = built(model_folder, *updates, "optim.schedule=linear", "algorithm.name=ppo", "critic.warmup_steps=4")
    assert waiting.schedule.decay_steps == 36, "6 updates in each of the last six steps"


@pytest.mark.parametrize("lora", [0, 2])
def test_chosen_template_is_kept_in_checkpoints(model_folder: Path, tmp_path: Path, lora: int) -> None:
    file, folder = tmp_path / "own.jinja", tmp_path / "checkpoint"
    file.write_text("{% for m in messages %}{{ m.role }} says {{ m.content }} {% endfor %}")
    chosen = [f"model.chat_template={file}", "model.tool_prompt=hermes", f"model.lora_rank={lora}"]
    backend = LocalBackend.from_config(load_config([f"model.path={model_folder}", *chosen]))
    folder.mkdir()
    backend.save(folder)
    backend.load(folder)
    backend.close()
    messages = [{"role": "user", "content": "a"}]
    text = backend.inference.template.render_text(messages, [{"type": "function", "function": {"name": "f"}}])
    assert text.startswith("system says # Tools")
    assert text.endswith("user says a ")
    assert load_tokenizer(folder).tokenizer.chat_template == backend.inference.template.text


def test_second_adapter_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    config = load_config([f"model.path={tmp_path}", "model.lora_rank=2"])
    with pytest.raises(ConfigError, match=r"model\.lora_rank=2"):
        LocalBackend.from_config(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=no/such/folder", "no such folder"),
        ("model.tool_parser=hermse", "did you mean 'hermes'"),
        ("model.chat_template=no/such.jinja", "model.chat_template='no/such.jinja' cannot be read"),
        ("model.device=tpu9", "device='tpu9'"),
        ("model.lora_alpha=32", "would have no effect without an adapter; set model.lora_rank, too"),
        ("critic.lr=0.1", "would have no effect because grpo has no critic; leave it out"),
        ("model.reference_offload=true", "would have no effect without a reference; set algorithm.kl_coef, too"),
    ],
)
def test_invalid_value_is_rejected(model_folder: Path, override: str, message: str) -> None:
    config = load_config([f"model.path={model_folder}", override])
    with pytest.raises(ConfigError, match=message):
        LocalBackend.from_config(config)
    with pytest.raises(ConfigError, match=message):  # before anything is loaded or written
        AgentTrainer(agent_run_func=lambda word: 1.0, train_dataset=[{"word": "fig"}], config=config)
