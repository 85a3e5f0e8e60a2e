import socket
from pathlib import Path

import pytest
import torch

from rllm.inference.local.loading import choose_device
from rllm.trainer import checkup
from rllm.trainer.checkup import disk, gpus, memory, python, reachable_port


def test_interpreter_is_reported() -> None:
    assert python().ok


def test_model_that_exceeds_the_memory_is_a_problem() -> None:
    assert memory(None).ok
    assert memory(1.0).ok
    found = memory(1e18)
    assert not found.ok
    assert "training all weights takes 1000000000.0 GB" in found.detail
    assert "model.lora_rank=16" in found.fix


def test_total_memory_counts_if_free_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "free_memory", lambda: None)
    assert "free" not in memory(None).detail
    assert memory(1.0).ok
    assert not memory(1e18).ok


def test_apple_gpu_is_used_only_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (choose_device("auto").type, choose_device("mps").type) == ("cpu", "mps")
    assert "models run on the CPU, unless model.device=mps" in gpus().detail


def test_disk_too_small_for_the_checkpoints_is_a_problem(tmp_path: Path) -> None:
    found = disk(tmp_path / "runs", 1e18)
    assert not found.ok
    assert "run_dir" in found.fix
    assert not (tmp_path / "runs").exists()


def test_run_folder_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    found = disk(tmp_path / "notes.txt" / "run", None)
    assert (found.ok, found.detail) == (False, f"{tmp_path / 'notes.txt'} is a file")
    assert "--run-dir" in found.fix


def test_unwritable_folder_is_reported() -> None:
    found = disk(Path("/proc/runs"), None)
    assert not found.ok
    assert "cannot be written to (" in found.detail


def test_port_in_use_is_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = reachable_port(port)
    assert (found.ok, found.needed) == (False, False)
    assert str(port) in found.detail
    assert reachable_port(0).ok
