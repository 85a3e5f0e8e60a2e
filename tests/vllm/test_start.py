"""Startup errors of a real vLLM, and our messages about them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rllm.errors import InferenceError
from rllm.inference.servers.command import ServeOptions
from rllm.inference.servers.vllm_server import VLLMServer, free_port

from .conftest import ARGUMENTS, START_S, Servers

pytestmark = pytest.mark.vllm


def start(command: str, model: Path, log: Path, *more: str) -> VLLMServer:
    options = ServeOptions(
        model=str(model), port=free_port(), dtype="float32", on_cpu=True, extra_args=(*ARGUMENTS, *more)
    )
    return VLLMServer.start(options, command=[command], log=log, start_timeout_s=START_S)


def test_unsupported_model_is_rejected(servers: Servers, vllm_command: str, tmp_path: Path) -> None:
    servers.close()
    shutil.copytree(servers.folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {**config, "architectures": ["GhostForCausalLM"], "model_type": "ghost"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InferenceError, match=r"vllm\.command") as caught:
        start(vllm_command, tmp_path / "model", tmp_path / "log")
    assert "The end of its log" in str(caught.value)


def test_unsupported_argument_is_rejected(servers: Servers, vllm_command: str, tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match=r"vllm\.args"):
        start(vllm_command, servers.folder / "model", tmp_path / "log", "--no-such-argument")
