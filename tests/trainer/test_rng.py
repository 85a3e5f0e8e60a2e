from __future__ import annotations

import json
import random

import numpy as np
import torch

from rllm.trainer.checkpoint import generator_states, restore_generators, seed_generators


def draws() -> list[float]:
    return [random.random(), random.gauss(), np.random.random(), np.random.normal(), float(torch.rand(()))]


def test_random_numbers_continue_from_the_saved_state() -> None:
    seed_generators(3)
    draws()  # leaves half of a pair of normal numbers in two generators
    kept = json.loads(json.dumps(generator_states()))
    expected = draws()
    draws()
    restore_generators(kept)
    assert draws() == expected


def test_seed_determines_all_random_numbers() -> None:
    seed_generators(-1)
    first = draws()
    seed_generators(-1)
    assert draws() == first
    seed_generators(0)
    assert not set(draws()) & set(first)
