"""Training on environments by name, with tiny policies that know the format of an answer, and often guess.

`python -m tests.learning.named gymnasium seed=1` runs the command of a scheme, as a user would type it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.tracking.about import evaluations_of
from rllm.types import Message

from . import alphabet

RECIPE = TinyPolicyRecipe(
    hidden_size=64,
    num_layers=2,
    intermediate_size=192,
    vocab_size=300,
    context_length=512,
    skill_steps=100,
    habit_steps=40,
    batch_size=32,
)
LAKE = "SFFF FHFH FFFH HFFG".replace(" ", "")
MOVES = (-1, 4, 1, -4)
"""Change of the place by each action of FrozenLake: left, down, right, up."""


def walker() -> Path:
    """Return the folder of a policy for FrozenLake: it observes a place and answers with a move, half of the time at random."""
    recipe = replace(RECIPE, skill_steps=60, batch_size=16)
    return tiny_policy(partial(_walks, care=0.8), partial(_walks, care=0.5), recipe=recipe)


def adder() -> Path:
    """Return the folder of a policy that guesses the sums and differences of reasoning-gym's chain_sum."""
    recipe = replace(RECIPE, skill_steps=300, context_length=128)
    return tiny_policy(partial(_sums, care=1.0), partial(_sums, care=0.2), recipe=recipe)


def _walks(seed: int, *, care: float) -> Iterator[list[Message]]:
    rng = random.Random(seed)
    while True:
        place, messages = 0, []
        while LAKE[place] in "SF" and len(messages) < 40:
            good = [
                action for action in range(4) if _moved(place, action) > place and LAKE[_moved(place, action)] != "H"
            ]
            action = rng.choice(good) if good and rng.random() < care else rng.randrange(4)
            messages += [_message("user", place), _message("assistant", action)]
            place = _moved(place, action)
        yield messages


def _moved(place: int, action: int) -> int:
    row, column = divmod(place, 4)
    blocked = (column == 0, row == 3, column == 3, row == 0)[action]
    return place if blocked else place + MOVES[action]


def _sums(seed: int, *, care: float) -> Iterator[list[Message]]:
    rng = random.Random(seed)
    while True:
        first, second = rng.randint(0, 9), rng.randint(0, 9)
        sign = rng.choice("+-")
        right = first + second if sign == "+" else first - second
        answer = right if rng.random() < care else rng.randint(-9, 18)
        question = f"State the final answer to the following arithmetic problem: {first} {sign} {second} ="
        yield [_message("user", f"{question}\n\nEnd with the final answer, a number."), _message("assistant", answer)]


def _message(role: str, content: object) -> Message:
    return {"role": role, "content": str(content)}


@dataclass(frozen=True)
class Training:
    """A scheme's environments to train on and to hold out, its policy, and settings."""

    env: str
    held_out: str
    policy: Callable[[], Path]
    settings: Sequence[str]
    python: str = sys.executable
    folder: Path | None = None
    """Folder of the environment's module."""

    def command(self, run_dir: Path, *more: str) -> list[str]:
        """Return the command of a run."""
        named = ["--env", self.env, "--val", self.held_out, "--model", str(self.policy())]
        return [self.python, "-m", "rllm", "train", *named, f"run_dir={run_dir}", *SHARED, *self.settings, *more]

    def run(self, run_dir: Path, *more: str) -> list[float]:
        """Train, and return the held-out mean reward of each evaluation."""
        variables = {**os.environ, "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}"}
        command = self.command(run_dir, *more)
        done = subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [metrics["eval/reward"] for metrics in evaluations_of(run_dir)]


SHARED = ["num_steps=20", "rollout.group_size=8", "eval.every=20", "save_every=0"]
_LAKE = "gymnasium:FrozenLake-v1?is_slippery=false&max_steps=12&size=32"
_SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&format=number"
TRAININGS = {
    "gymnasium": Training(
        _LAKE, f"{_LAKE}&seed=1000", walker, ["tasks_per_step=4", "rollout.max_tokens=4", "optim.lr=1e-3"]
    ),
    "reasoning-gym": Training(
        f"{_SUMS}&size=400",
        f"{_SUMS}&size=100&seed=1000",
        adder,
        ["tasks_per_step=8", "rollout.max_tokens=6", "optim.lr=5e-4"],
    ),
}


def openenv(url: str) -> Training:
    """Return the training on a server's environment of letters."""
    settings = ["tasks_per_step=8", "rollout.max_tokens=12", "optim.lr=5e-4"]
    return Training(f"openenv:{url}?size=200", f"openenv:{url}?size=64&seed=1000", alphabet.policy, settings)


def verifiers(venv: Path) -> Training:
    """Return the training on the environment of letters of `tests/verifiers`, in a virtual environment of the package."""
    return Training(
        "verifiers:letters",
        "verifiers:letters?held_out=true",
        alphabet.policy,
        ["tasks_per_step=8", "rollout.max_tokens=12", "optim.lr=5e-4"],
        python=str(venv.absolute() / "bin" / "python"),
        folder=Path(__file__).parents[1] / "verifiers" / "environments",
    )


if __name__ == "__main__":
    scheme, *more = sys.argv[1:]
    sys.exit(subprocess.call(TRAININGS[scheme].command(Path("runs") / f"named-{scheme}", *more)))
