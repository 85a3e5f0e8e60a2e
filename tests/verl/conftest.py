"""A real Ray with a few CPUs, and real workers of verl on it. `make test-verl` installs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

if find_spec("verl") is None or find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a key into the home of the user who runs the tests
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it every start prints a deprecation warning
os.environ.pop("RAY_ADDRESS", None)

STORE_BYTES = 128 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster to which this process is connected, as a user's own program may be."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with grouped-query attention."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["the user asks the assistant, and the assistant answers\n"] * 50, vocab_size=400)
    recipe = TinyPolicyRecipe(hidden_size=64, num_layers=2, num_heads=4, num_key_value_heads=2, intermediate_size=128)
    new_model(tokenizer, recipe).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
