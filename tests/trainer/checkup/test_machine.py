import socket
from pathlib import Path

import pytest
import torch

from rllm.inference.local.loading import choose_device
from rllm.trainer import checkup
from rllm.trainer.checkup import disk, gpus, memory, python, reachable_port


def test_the_interpreter() -> None:
    assert python().ok


def test_memory_that_a_model_does_not_fit_into() -> None:
    assert memory(None).ok
    assert memory(1.0).ok
    found = memory(1e18)
    assert not found.ok
    assert "training all weights takes 1000000000.0 GB" in found.detail
    assert "model.lora_rank=16" in found.fix


def test_all_memory_counts_where_free_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "free_memory", lambda: None)
    assert "free" not in memory(None).detail
    assert memory(1.0).ok
    assert not memory(1e18).ok


def test_a_model_runs_on_an_apple_gpu_only_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (choose_device("auto").type, choose_device("mps").type) == ("cpu", "mps")
    assert "models run on the CPU, unless model.device=mps" in gpus().detail


def test_a_disk_that_is_too_small_for_the_checkpoints(tmp_path: Path) -> None:
    found = disk(tmp_path / "runs", 1e18)
    assert not found.ok
    assert "run_dir" in found.fix
    assert not (tmp_path / "runs").exists()


def test_runs_are_not_written_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    found = disk(tmp_path / "notes.txt" / "run", None)
    assert (found.ok, found.detail) == (False, f"{tmp_path / 'notes.txt'} is a file")
    assert "--run-dir" in found.fix


def test_a_folder_that_cannot_be_written_to_is_told() -> None:
    found = disk(Path("/proc/runs"), None)
    assert not found.ok
    assert "cannot be written to (" in found.detail


def test_a_port_that_is_taken_is_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = reachable_port(port)
    assert (found.ok, found.needed) == (False, False)
    assert str(port) in found.detail
    assert reachable_port(0).ok
