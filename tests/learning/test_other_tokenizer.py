"""A policy learns from a teacher with another tokenization of the same letters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rllm.inference.local.loading import load_tokenizer
from rllm.testing.tiny_policy import tiny_policy

from .alphabet import RECIPE, STARTS_CORRECTLY, conversations
from .runs import SEEDS, curve_of, train
from .test_learning import MARGIN


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_across_tokenizers_improves_the_policy(seed: int, tmp_path: Path) -> None:
    """A larger vocabulary has tokens of a letter with the space before it."""
    skill = partial(conversations, starts_correctly=1.0)
    habit = partial(conversations, starts_correctly=STARTS_CORRECTLY)
    policy = tiny_policy(skill, habit, recipe=replace(RECIPE, vocab_size=264))
    teacher = tiny_policy(skill, skill, recipe=RECIPE)
    own, theirs = (load_tokenizer(folder).tokenizer.encode("d e f g h") for folder in (policy, teacher))
    assert len(theirs) < len(own)
    settings = [f"teacher.path={teacher}", "teacher.align=text", "rollout.max_tokens=20"]
    first, *_, last = curve_of(train("distill", seed, policy=policy, run_dir=tmp_path, settings=settings)).values()
    assert last > first + MARGIN
