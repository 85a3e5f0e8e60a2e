from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from rllm.demo import tasks
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy


@pytest.fixture(scope="session")
def policy_folder(policies: Path) -> Path:
    """A model of a few thousand parameters."""
    recipe = TinyPolicyRecipe(
        hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400, skill_steps=2, habit_steps=1, batch_size=2
    )
    speech = partial(tasks.conversations, tasks.CAREFUL, system="Answer.")
    return tiny_policy(
        lambda seed: speech(seed=seed), lambda seed: speech(seed=seed), recipe=recipe, cache_dir=policies
    )
