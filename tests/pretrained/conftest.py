"""SmolLM2-135M-Instruct: a real pretrained model, in its published folder. `make test-pretrained` makes the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 7200.0


@pytest.fixture(scope="session")
def smollm() -> Path:
    folder = Path(os.environ.get("RLLM_TEST_PRETRAINED", ".pretrained")).absolute()
    assert (folder / "config.json").exists(), f"{folder} is not there: run `make test-pretrained`"
    return folder


@pytest.fixture(scope="session")
def reference(smollm: Path) -> Any:
    """The model as `transformers` itself loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm, dtype="float32").eval()


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """A finished `rllm demo --model`."""

    folder: Path
    before: float
    """Share of right answers to held-out tasks."""
    after: float

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "step-000015"


def run_demo(folder: Path, *arguments: str, resume: str | None = None) -> DemoRun:
    """Run the demo in its own folder, or resume a run of it there."""
    begin = ["demo"] if resume is None else ["train", "--resume", resume]
    command = [sys.executable, "-m", "rllm", *begin, *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    return DemoRun(
        folder=folder / outcome["run_dir"], before=outcome["accuracy_before"], after=outcome["accuracy_after"]
    )


@pytest.fixture(scope="session")
def trained(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The model, trained on sums, for other tests."""
    return run_demo(tmp_path_factory.mktemp("demo"), "--model", str(smollm))
