"""A tiny model that knows shell commands, but seldom which one is asked for; built on first use, without network.

`python offline.py` builds the model, and prints its folder.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from rllm.tasks.agents.terminus import DONE, SYSTEM_PROMPT
from rllm.tasks.shell_tasks import NOUNS, shell_tasks
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.types import Message

RECIPE = TinyPolicyRecipe(
    hidden_size=96,
    num_layers=2,
    intermediate_size=256,
    vocab_size=420,
    context_length=256,
    skill_steps=400,
    habit_steps=60,
    batch_size=32,
)
FIRST_SEED = 1_000_000
"""First seed of the tasks in the demonstrations; training and evaluation use smaller seeds."""
PICKS_CORRECTLY = 0.1
"""Share of demonstrations with the right command; the others have one of any kind, which may be right, too."""
COMMANDS = {
    "create": "echo {word} > {last}",
    "rename": "mv {first} {last}",
    "copy": "cp {first} {last}",
    "delete": "rm {first}",
    "collect": "cat *.txt > {last}",
    "search": "grep -l {word} *.txt > {last}",
    "count": "wc -l < {first} > {last}",
    "edit": "sed -i s/{word}/{other}/ {first}",
}
"""Commands by kind of task."""


def policy() -> Path:
    """Return the folder of the tiny model, which is built on first use."""
    return tiny_policy(
        partial(conversations, picks_correctly=1.0),
        partial(conversations, picks_correctly=PICKS_CORRECTLY),
        recipe=RECIPE,
    )


def conversations(seed: int, *, picks_correctly: float) -> Iterator[list[Message]]:
    """Yield demonstrations without end: a command for a task, its output, and done."""
    rng = random.Random(seed)
    for number in count(FIRST_SEED + 1000 * seed):
        for task in shell_tasks(64, seed=number):
            command = COMMANDS[task.kind if rng.random() < picks_correctly else rng.choice(list(COMMANDS))]
            output = rng.choice(["[exit code 0]", f"{rng.choice(list(task.files))}: No such file\n[exit code 1]"])
            yield [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": task.instruction},
                {"role": "assistant", "content": _filled_in(command, task.instruction, rng)},
                {"role": "user", "content": output},
                {"role": "assistant", "content": DONE},
            ]


def _filled_in(command: str, instruction: str, rng: random.Random) -> str:
    """Return a command with the files and words of the instruction; unknown words are replaced by any."""
    files = re.findall(r"\w+\.txt", instruction)
    words = [word for word in re.findall(r"\w+", instruction) if word in NOUNS]
    words += rng.sample(NOUNS, 2)
    return command.format(first=files[0], last=files[-1], word=words[0], other=words[1])


if __name__ == "__main__":
    print(policy())
