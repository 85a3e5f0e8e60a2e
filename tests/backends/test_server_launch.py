"""`model.engine=vllm`: effects of each setting of the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import Qwen3Config

from rllm.backends.server_launch import RunningServer, check_serving, open_server
from rllm.errors import ConfigError, MissingDependencyError, WeightSyncError
from rllm.inference.servers.vllm_server import free_port
from rllm.trainer.config import TrainConfig, load_config

from ..inference.conftest import build_tokenizer
from ..inference.endpoint import endpoint

STAND_IN = Path(__file__).parents[1] / "inference" / "servers" / "stand_in.py"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make the parts of a model's folder that a start reads."""
    folder = tmp_path / "m"
    build_tokenizer().save_pretrained(folder)
    Qwen3Config().save_pretrained(folder)
    return folder


def configured(folder: Path, *overrides: str) -> TrainConfig:
    return load_config(
        [
            f"model.path={folder / 'm'}",
            "model.engine=vllm",
            "model.device=cpu",
            f"run_dir={folder / 'run'}",
            f"vllm.command={sys.executable} {STAND_IN} {folder}",
            *overrides,
        ]
    )


@contextmanager
def opened(config: TrainConfig) -> Iterator[RunningServer]:
    served = open_server(config)
    try:
        yield served
    finally:
        served.close()


def arguments_of(folder: Path) -> list[str]:
    [line] = (folder / "starts").read_text().splitlines()
    arguments: list[str] = json.loads(line.partition(" ")[2])
    return arguments


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_minimal_settings_start_a_server(tmp_path: Path, model: Path) -> None:
    with opened(configured(tmp_path)) as served:
        arguments = arguments_of(tmp_path)
        assert arguments[:2] == ["serve", str(model)]
        assert value_of(arguments, "--dtype") == "float32"  # as the trainer's on a CPU
        assert arguments[-1] == "GPUs=all"
        assert (tmp_path / "run" / "vllm.log").exists()
        assert served.server.start_timeout_s == 600.0
        assert served.scratch.exists()
        assert "/sleep" not in (tmp_path / "calls").read_text()
    assert not served.scratch.exists()


@pytest.mark.parametrize(
    ("printed", "settings", "expected"),
    [
        ("<tool_call>", [], "hermes"),
        ("<tool_call><function=f><parameter=x>", [], "qwen3_coder"),
        ("<|channel|><|message|>", [], "openai"),
        ("[TOOL_CALLS]", [], "mistral"),
        ("[TOOL_CALLS]", ["model.tool_parser=deepseek_r1"], "deepseek_v3"),
        ("none", [], "hermes"),
    ],
)
def test_tool_call_parser_follows_the_template(
    tmp_path: Path, model: Path, printed: str, settings: list[str], expected: str
) -> None:
    (model / "chat_template.jinja").write_text(printed + "{{ messages[0].content }}")
    with opened(configured(tmp_path, *settings)):
        assert value_of(arguments_of(tmp_path), "--tool-call-parser") == expected


def test_chosen_template_reaches_the_server(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with opened(configured(tmp_path, "model.tool_prompt=hermes")):
        arguments = arguments_of(tmp_path)
        text = Path(value_of(arguments, "--chat-template")).read_text()
        assert text.endswith("{% for m in messages %}{{ m.content }}{% endfor %}")
        assert "tool_response" in text
        assert value_of(arguments, "--tool-call-parser") == "hermes"


@pytest.mark.parametrize("setting", ["model.tool_prompt=hermes", "model.chat_template=own.jinja"])
@pytest.mark.usefixtures("model")
def test_running_server_keeps_its_template(tmp_path: Path, setting: str) -> None:
    config = load_config(
        [f"model.path={tmp_path / 'm'}", "model.engine=vllm", "vllm.url=http://127.0.0.1:9/v1", setting]
    )
    with pytest.raises(ConfigError, match=rf"{setting.partition('=')[0]}.*--chat-template"):
        check_serving(config)


@pytest.mark.usefixtures("model")
def test_every_setting_reaches_the_server(tmp_path: Path) -> None:
    port, sync_dir = free_port(), tmp_path / "sync"
    config = configured(
        tmp_path,
        f"vllm.port={port}",
        "vllm.devices=2,3",
        "vllm.dtype=bfloat16",
        "vllm.gpu_memory=0.3",
        "vllm.reasoning_parser=qwen3",
        'vllm.args=["--tensor-parallel-size=2"]',
        "vllm.sleep=always",
        "vllm.start_timeout_s=99",
        "vllm.max_restarts=5",
        f"vllm.sync_dir={sync_dir}",
        "model.max_length=512",
        "model.tool_parser=mistral",
        "model.lora_rank=4",
    )
    with opened(config) as served:
        arguments = arguments_of(tmp_path)
        assert value_of(arguments, "--port") == str(port)
        assert value_of(arguments, "--dtype") == "bfloat16"
        assert value_of(arguments, "--gpu-memory-utilization") == "0.3"
        assert value_of(arguments, "--reasoning-parser") == "qwen3"
        assert value_of(arguments, "--max-model-len") == "512"
        assert value_of(arguments, "--tool-call-parser") == "mistral"
        assert value_of(arguments, "--max-lora-rank") == "8"
        assert "--enable-sleep-mode" in arguments
        assert arguments[-2:] == ["--tensor-parallel-size=2", "GPUs=2,3"]
        assert "/sleep" in (tmp_path / "calls").read_text()  # it sleeps until the trainer has loaded its model
        assert served.server.start_timeout_s == 99.0
        assert served.server._max_restarts == 5
        assert served.scratch.parent == sync_dir


@pytest.mark.usefixtures("model")
def test_server_on_a_shared_gpu_leaves_memory_for_the_trainer(tmp_path: Path) -> None:
    with opened(configured(tmp_path, "vllm.devices=0", "vllm.sleep=always")):
        arguments = arguments_of(tmp_path)
        assert value_of(arguments, "--gpu-memory-utilization") == "0.4"
        assert "--enable-sleep-mode" in arguments


def test_server_is_not_started_with_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    with pytest.raises(ConfigError, match="is a LoRA adapter"):
        check_serving(configured(tmp_path))


def test_running_server_is_joined(tmp_path: Path) -> None:
    with endpoint(models=["ours"]) as url:
        settings = ["model.engine=vllm", f"vllm.url={url}", f"run_dir={tmp_path}"]
        with opened(load_config(settings)) as joined:
            assert joined.server.control.models() == ["ours"]
            assert joined.server.pid is None
            assert joined.scratch.parent == tmp_path
        assert not joined.scratch.exists()


@pytest.mark.parametrize(
    ("abilities", "message"),
    [
        ({"gives_ids": False}, "token ids: .*; use a server that returns token ids"),
        ({"routes": []}, "new weights: this server takes no new weights.*; start it"),
        ({"kind": "raw"}, "kind of log-probabilities: raw.*processed_logprobs"),
    ],
)
def test_server_without_training_support_is_rejected_at_once(
    abilities: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with endpoint(**abilities) as url:
        settings = ["model.engine=vllm", f"vllm.url={url}", "rollout.temperature=0.7", f"run_dir={tmp_path}"]
        with pytest.raises(ConfigError, match=message):
            open_server(load_config(settings))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["vllm.port=8000"], r"vllm\.port=8000 would have no effect without a server; set model\.engine=vllm, too"),
        (["vllm.largest_gap=0.1"], r"vllm\.largest_gap=0\.1 would have no effect"),
        (["model.engine=vllm", "vllm.url=http://h/v1", "vllm.args=[x]"], r"vllm\.args.* on a server that runs already"),
        (
            ["model.engine=vllm", "vllm.url=http://h/v1", "model.lora_rank=2", "model.quantize=int8"],
            r"model\.quantize='int8' would have no effect on the server",
        ),
        (["model.engine=vllm", "vllm.command=/no/such"], "no such program"),
        (["model.engine=vllm", "vllm.url=http://h/v1", "vllm.sleep=always", "rollout.max_staleness=1"], "take turns"),
    ],
)
def test_impossible_and_ineffective_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_serving(load_config(overrides))


def test_missing_vllm_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="vLLM"):
        check_serving(load_config(["model.engine=vllm"]))


def test_allowed_gap_depends_on_the_dtype_unless_set(make_model: Any, tokenizer: Any) -> None:
    from rllm.backends.weight_sync_check import Probe

    assert Probe(make_model(), tokenizer).largest_gap == 1e-3
    assert Probe(make_model().bfloat16(), tokenizer).largest_gap == 0.3
    assert Probe(make_model(), tokenizer, largest_gap=0.05).largest_gap == 0.05


def test_probe_fits_the_context_of_the_model(make_model: Any, tokenizer: Any) -> None:
    from rllm.backends.weight_sync_check import Probe

    model = make_model()
    assert len(Probe(model, tokenizer).ids) == 160
    assert len(Probe(model, tokenizer, max_length=40).ids) == 38
    model.config.max_position_embeddings = 64
    assert len(Probe(model, tokenizer).ids) == 62


def test_weights_are_compared_under_nested_names(make_model: Any, tokenizer: Any) -> None:
    from rllm.backends.weight_sync_check import Probe, bits_of

    model = make_model()
    norm = model.model.norm.weight

    class Server:
        bits = bits_of(norm)

        def weight_bits(self) -> list[dict[str, Any]]:
            found = [list(norm.shape), str(norm.dtype), self.bits]
            return [{"language_model.model.norm.weight": found, "visual.merger.norm.weight": found}]

    server, probe = Server(), Probe(model, tokenizer)
    assert probe.check_bits(cast("Any", server)) == 1
    server.bits += 1
    with pytest.raises(WeightSyncError, match=r"language_model\.model\.norm\.weight"):
        probe.check_bits(cast("Any", server))
