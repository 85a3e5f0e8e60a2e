"""The picture in the docs has every algorithm, and is drawn from the numbers beside it."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path

import pytest

from .runs import EVAL_EVERY, NAMES, NUM_STEPS, SEEDS

ROOT = Path(__file__).parents[2]

Curves = dict[str, dict[str, dict[str, float]]]


@pytest.fixture
def curves() -> Curves:
    numbers: Curves = json.loads((ROOT / "docs" / "learning.json").read_text())
    return numbers


def test_picture_has_every_registered_algorithm_with_all_seeds(curves: Curves) -> None:
    seeds = {str(seed) for seed in SEEDS}
    assert {name: set(drawn) for name, drawn in curves.items()} == dict.fromkeys(NAMES, seeds)


def test_all_curves_are_measured_after_the_same_steps(curves: Curves) -> None:
    measured = {tuple(curve) for drawn in curves.values() for curve in drawn.values()}
    assert measured == {tuple(str(step) for step in range(0, NUM_STEPS + 1, EVAL_EVERY))}


def test_picture_is_drawn_from_the_numbers(curves: Curves) -> None:
    drawing = run_path(str(ROOT / "benchmarks" / "learning.py"))
    assert (ROOT / "docs" / "learning.svg").read_text() == drawing["draw"](curves)
    assert (ROOT / "docs" / "shell_tasks.svg").read_text() == drawing["draw_shell_tasks"]()
