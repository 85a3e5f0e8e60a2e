"""The verifier of a task: it runs in a sandbox in which no agent has worked, and writes a reward."""

from __future__ import annotations

import json
import math

from rllm.errors import RewardError, last_lines, shown
from rllm.rewards.scoring import as_float, reward_output
from rllm.sandbox.base import ExecResult, Sandbox
from rllm.tasks.task import TaskFolder

_RUN = "chmod +x /tests/test.sh && exec /tests/test.sh"
# A link could lead anywhere, and a pipe would wait for ever, so only a regular file is read.
_READ = """\
cd /logs/verifier || exit
for name in reward.json reward.txt; do
    if [ -f $name ] && [ ! -L $name ]; then echo $name; head -c 65536 $name; exit; fi
    if [ -e $name ] || [ -L $name ]; then echo odd; exit; fi
done
"""


async def run_verifier(task: TaskFolder, sandbox: Sandbox) -> ExecResult:
    """Run the verifier of a task.

    Args:
        task: the task, whose `tests` are copied to `/tests` unless the verifier's image has them.
        sandbox: a new one, with the agent's files and an empty `/logs/verifier`.

    Raises:
        SandboxError: if the sandbox ends.
    """
    if task.verifier_image is None:
        await sandbox.upload(task.tests, "/tests")
    return await sandbox.exec(_RUN, env=task.verifier_env, timeout_s=task.verifier_timeout_s)


async def reward_of(task: TaskFolder, sandbox: Sandbox, ended: ExecResult) -> tuple[float, dict[str, float]]:
    """Return the reward that the verifier has written, and its parts if it has several.

    Raises:
        RewardError: if the verifier did not end in time, or wrote no reward that is a finite number.
        SandboxError: if the sandbox ends.
    """
    output = f". Its output ends: {last_lines(ended.output)}" if ended.output else ""
    if ended.timed_out:
        raise RewardError(
            f"the verifier of {task.name} did not end within verifier.timeout_sec={task.verifier_timeout_s:g}: fix "
            f"tests/test.sh, or raise that in task.toml{output}"
        )
    found = await sandbox.exec(_READ, cwd="/", timeout_s=task.verifier_timeout_s)
    name, _, content = found.stdout.partition("\n")
    try:
        return reward_in(name, content)
    except RewardError as error:
        end = f"tests/test.sh ended with exit code {ended.exit_code}{output}"
        raise RewardError(f"the verifier of {task.name} {error}; {end}") from None


def reward_in(name: str, content: str) -> tuple[float, dict[str, float]]:
    """Return the reward in a verifier's file, and its parts if it has several.

    An object in `reward.json` has a number for each part; its key `reward`, or else their sum, is the reward.

    Args:
        name: `reward.json`, `reward.txt`, `odd` for anything but a regular file, or empty.
        content: text of the file.

    Raises:
        RewardError: if the reward is not a finite number; its message continues a sentence about the verifier.
    """
    if name not in ("reward.json", "reward.txt"):
        what = "left no regular file as reward" if name == "odd" else "wrote no reward"
        raise RewardError(f"{what}: it must write a number to /logs/verifier/reward.txt, or numbers to reward.json")
    try:
        values = float(content) if name == "reward.txt" else json.loads(content)
    except (ValueError, RecursionError):
        raise RewardError(f"wrote {shown(content.strip())} to {name}: it must be a number") from None
    numbers = list(values.values()) if isinstance(values, dict) else [values]
    if not numbers or not all(isinstance(value, int | float) and math.isfinite(as_float(value)) for value in numbers):
        raise RewardError(f"wrote {shown(content.strip())} to {name}: rewards must be finite numbers")
    if not isinstance(values, dict):
        return float(values), {}
    parts = {str(key): float(value) for key, value in values.items()}
    if "reward" in parts:
        return parts["reward"], parts
    total = reward_output(parts, "verifier").reward
    assert total is not None  # all parts are numbers
    return total, parts
