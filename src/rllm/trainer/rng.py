"""The random number generators that all code of a process shares: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Begin every generator anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def states() -> dict[str, Any]:
    """The states of all generators, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore(states: Mapping[str, Any]) -> None:
    """Put every generator where it was when `states` were taken. GPUs only where there are as many as then."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in states["cuda"]])


def _text(state: torch.Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
