"""The demo's model: a tiny policy that can do the task, but mostly guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rllm.demo.tasks import CAREFUL, SLOPPY, Clerk, conversations
from rllm.testing.tiny_policy import OnProgress, TinyPolicyRecipe, tiny_policy
from rllm.types import Message


def demo_policy(
    system: str,
    tools: Sequence[Mapping[str, Any]],
    on_progress: OnProgress | None = None,
    *,
    recipe: TinyPolicyRecipe | None = None,
) -> Path:
    """Return the folder of the demo's model, which is built on first use; the recipe sets its size."""
    speech = partial(_speech, system=system)
    return tiny_policy(partial(speech, CAREFUL), partial(speech, SLOPPY), tools, recipe=recipe, on_progress=on_progress)


def _speech(clerk: Clerk, seed: int, *, system: str) -> Iterator[list[Message]]:
    return conversations(clerk, system=system, seed=seed)
