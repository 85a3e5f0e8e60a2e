"""The command line and the environment with which a server is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, MissingDependencyError
from rllm.inference.servers.command import PLUGIN, ServeOptions, serve_arguments, serve_environment, vllm_command


def options(**changes: Any) -> ServeOptions:
    return ServeOptions(**{"model": "Qwen/Qwen3-0.6B", "port": 8001, **changes})


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_server_command_requests_processed_logprobs_without_defaults() -> None:
    arguments = serve_arguments(options(dtype="float32", tool_parser="hermes"))
    assert arguments[:2] == ["serve", "Qwen/Qwen3-0.6B"]
    assert value_of(arguments, "--logprobs-mode") == "processed_logprobs"
    assert value_of(arguments, "--generation-config") == "vllm"
    assert value_of(arguments, "--host") == "127.0.0.1"
    assert value_of(arguments, "--port") == "8001"
    assert value_of(arguments, "--dtype") == "float32"
    assert value_of(arguments, "--tool-call-parser") == "hermes"
    assert value_of(arguments, "--served-model-name") == "policy"
    assert "--enable-auto-tool-choice" in arguments
    assert not {"--max-model-len", "--reasoning-parser", "--enable-lora", "--enable-sleep-mode"} & set(arguments)


def test_options_become_server_arguments() -> None:
    arguments = serve_arguments(
        options(max_length=4096, reasoning_parser="qwen3", gpu_memory=0.4, sleeps=True, extra_args=("--seed=3",))
    )
    assert value_of(arguments, "--max-model-len") == "4096"
    assert value_of(arguments, "--reasoning-parser") == "qwen3"
    assert value_of(arguments, "--gpu-memory-utilization") == "0.4"
    assert "--enable-sleep-mode" in arguments
    assert arguments[-1] == "--seed=3"
    assert "--gpu-memory-utilization" not in serve_arguments(options(gpu_memory=0.4, on_cpu=True))


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (4, "8"), (16, "16"), (100, "128")])
def test_adapter_is_served_under_the_policy_name(rank: int, room: str) -> None:
    arguments = serve_arguments(options(lora_rank=rank))
    assert value_of(arguments, "--served-model-name") == "policy-base"
    assert value_of(arguments, "--max-lora-rank") == room


def test_unsupported_adapter_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_rank=513.*512"):
        serve_arguments(options(lora_rank=513))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--port=80", r"vllm\.port"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--dtype=half", r"vllm\.dtype"),
        ("--api-key", "VLLM_API_KEY"),
    ],
)
def test_arguments_controlled_by_settings_are_rejected(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(extra_args=(argument,))


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--logprobs_mode=raw_logprobs", "--logprobs-mode"),
        ("--logprobs-mod=raw_logprobs", "--logprobs-mode"),
        ("--hos=0.0.0.0", "--host"),
        ("--weight-transfer-config.backend=nccl", "--weight-transfer-config"),
        ("--no-enable-lora", "--enable-lora"),
        ("--device-memory-utilization=0.9", "--device-memory-utilization"),
    ],
)
def test_alternative_spellings_of_controlled_arguments_are_rejected(argument: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"vllm\.args=.*{flag}"):
        options(extra_args=(argument,))


def test_similar_arguments_are_passed_on() -> None:
    free = ("--enforce-eager", "--model-impl=auto", "--max-loras=2", "-tp", "2", "--no-enable-prefix-caching", "--")
    assert serve_arguments(options(extra_args=free))[-len(free) :] == list(free)


def test_environment_has_our_plugin_and_the_values_of_the_user() -> None:
    environment = serve_environment(options(on_cpu=True), {"PYTHONPATH": "/ours", "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert environment["PYTHONPATH"] == str(PLUGIN)
    assert [path.name for path in PLUGIN.glob("*.py")] == ["rllm_vllm.py"]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert "VLLM_CPU_KVCACHE_SPACE" not in serve_environment(options(), {})
    assert serve_environment(options(devices="1,2"), {})["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_configured_command_is_used() -> None:
    assert vllm_command(f"{sys.executable} -m vllm") == [sys.executable, "-m", "vllm"]
    with pytest.raises(ConfigError, match=r"vllm\.command='/no/such/vllm'"):
        vllm_command("/no/such/vllm")


def test_missing_command_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"pip install vllm.*vllm\.command=.*vllm\.url="):
        vllm_command(None)
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert vllm_command(None) == [str(program)]
