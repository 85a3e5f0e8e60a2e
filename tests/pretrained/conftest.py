"""SmolLM2-135M-Instruct: a real pretrained model, as its folder comes. `make test-pretrained` makes the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


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
