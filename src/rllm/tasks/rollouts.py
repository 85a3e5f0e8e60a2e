"""`tasks:DIR`: rollouts of task folders in sandboxes, for the engines of the project.

Rows of tasks name folders of the machine that read them. Folders are sent with the rollouts to the nodes of a cluster,
and `here` returns the folder on this machine that a row names.
"""

from __future__ import annotations

import io
import socket
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from rllm.data.dataset import Dataset
from rllm.environments.named import NamedEnvironment, refuse_unknown, take_whole_number
from rllm.errors import ConfigError, concerning
from rllm.sandbox import open_backend
from rllm.sandbox.files import pack, unpack
from rllm.sandbox.owner import own_folder
from rllm.sandbox.pool import SandboxPool
from rllm.sdk.context import get_current_session
from rllm.sdk.variables import gateway_variables
from rllm.tasks.agents.named import open_agent
from rllm.tasks.folder import read_task, read_tasks
from rllm.tasks.run import run_task
from rllm.tasks.shell_tasks import shell_task_folders
from rllm.tasks.task import SandboxAgent, TaskFolder, TaskOutcome
from rllm.types import VERDICT_KEY, Trajectory

MODEL = "policy"
"""Name of the model in requests; the gateway replaces it."""
LIMITS = ("cpus", "memory_mb", "disk_mb", "max_processes")


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return tasks, and the function that rolls them out in sandboxes.

    Args:
        name: a task folder, a folder of them, the URL of a git repository, or `shell` for generated tasks.
        params: `agent` (terminus), `sandbox` (local), `max_steps` of terminus, `cpus`, `memory_mb`, `disk_mb` and
            `max_processes` instead of the tasks' own, `concurrency` (32) and `warm` (0) of `SandboxPool`; with `shell`
            also `size` (40) and `seed` (0).

    Raises:
        ConfigError: if tasks, agent or backend cannot be used.
    """
    own = dict(params)
    if name == "shell" and not Path(name).exists():
        size, seed = take_whole_number(own, "size", 40, least=1), take_whole_number(own, "seed", 0)
        source = str(shell_task_folders(size, seed=seed))
    else:
        source = name
    concurrency, warm = take_whole_number(own, "concurrency", 32, least=1), take_whole_number(own, "warm", 0)
    with concerning(f"env=tasks:{name}"):
        refuse_unknown(own, ("agent", "sandbox", "max_steps", "concurrency", "warm", *LIMITS))
    max_steps = take_whole_number(own, "max_steps", 0, least=1) if "max_steps" in own else None
    agent = own.get("agent", "terminus")
    rollouts = TaskRollouts(
        agent=open_agent(agent, max_steps=max_steps),
        sandbox=own.get("sandbox", "local"),
        concurrency=concurrency,
        warm=warm,
        limits=tuple((key, _amount(key, own[key])) for key in LIMITS if key in own),
    )
    tasks = read_tasks(source)
    rollouts.check()
    _named.update(dict.fromkeys(str(task.folder) for task in tasks))
    rows = [{"id": task.name, "folder": str(task.folder)} for task in tasks]
    return NamedEnvironment(
        tasks=Dataset.of_tasks(rows, name=name),
        agent_run_func=rollouts,
        about={"agent": agent, "sandbox": rollouts.sandbox},
        uses_model=rollouts.agent.uses_model,
    )


@dataclass(frozen=True, kw_only=True)
class TaskRollouts:
    """Rollouts of task folders by an agent, in sandboxes of a backend.

    When pickled, they include the folders of all tasks that this process has opened, for the nodes of a cluster.
    """

    agent: SandboxAgent
    sandbox: str = "local"
    concurrency: int = 32
    warm: int = 0
    limits: tuple[tuple[str, Any], ...] = ()
    """Fields of `SandboxLimits` to use instead of the tasks' own."""

    def check(self) -> None:
        """Raise `ConfigError` if agent or backend cannot be used on this machine."""
        self.agent.check()
        _pool(self.sandbox, self.concurrency, self.warm)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._arrived, (vars(self), packed_folders())

    @classmethod
    def _arrived(cls, fields: Mapping[str, Any], folders: Mapping[str, bytes | None]) -> Self:
        """Return rollouts that another process has sent.

        Raises:
            ConfigError: if a task folder, the agent or the backend is missing on this machine.
        """
        rollouts = cls(**fields)
        rollouts.check()
        unpack_folders(folders)
        return rollouts

    def __str__(self) -> str:
        return f"agent={self.agent}"

    def remedies(self, base_url: str) -> list[str]:
        """Return advice for an agent that made no model call, see `engine.agent_function_engine.AdvisedAgent`."""
        return [
            f"send its model calls to `base_url`, which it is given (here {base_url}); programs in the sandbox reach "
            "it by the URL that `sandbox.open_route(base_url)` returns, and have no other network",
            "only agent=oracle needs no model",
        ]

    async def __call__(self, *, folder: str, base_url: str) -> Trajectory:
        """Let the agent work on a task, and verify the result; if that fails, keep what is known for the episode."""
        task = _task(folder)

        def keep(outcome: TaskOutcome) -> None:
            if (session := get_current_session()) is not None:
                session.trajectories.append(_trajectory(outcome, self.agent))

        outcome = await run_task(
            replace(task, limits=replace(task.limits, **dict(self.limits))),
            self.agent,
            _pool(self.sandbox, self.concurrency, self.warm),
            base_url=base_url,
            api_key=gateway_variables(base_url)["OPENAI_API_KEY"],
            model=MODEL,
            on_failure=keep,
        )
        return _trajectory(outcome, self.agent)


def _trajectory(outcome: TaskOutcome, agent: SandboxAgent) -> Trajectory:
    return Trajectory(
        reward=outcome.reward,
        reward_parts=dict(outcome.reward_parts),
        info={VERDICT_KEY: outcome.verdict()},
        trainable=agent.uses_model,
    )


@cache
def _pool(name: str, concurrency: int, warm: int) -> SandboxPool:
    return SandboxPool(open_backend(name), concurrency=concurrency, warm=warm)


@cache
def _task(folder: str) -> TaskFolder:
    return read_task(here(folder))


def _amount(key: str, text: str) -> float:
    try:
        value = float(text) if key == "cpus" else int(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{key}={text}: use a number above 0")
    return value


MAX_SENT_MB = 100
"""Mebibytes of all task folders of a run; larger ones are not sent, and are read from a disk that the nodes share."""

_named: dict[str, None] = {}
"""Folders that this process's rows name, in training and evaluations."""
_copies: dict[str, Path] = {}
"""Copies in this process, by the folder on the machine that sent them."""


def packed_folders() -> Mapping[str, bytes | None]:
    """Return all folders that rows name, each with its compressed files, or `None` if these are too large to send."""
    folders = [folder for folder in map(Path, _named) if folder.is_dir()]
    num_bytes = sum(path.lstat().st_size for folder in folders for path in folder.rglob("*"))
    return {str(folder): None if num_bytes > MAX_SENT_MB << 20 else _packed(folder) for folder in folders}


def _packed(folder: Path) -> bytes:
    archive = io.BytesIO()
    pack(folder, archive, name="")
    return zlib.compress(archive.getvalue(), 1)


def unpack_folders(packed: Mapping[str, bytes | None]) -> None:
    """Write the folders of another machine for `here`.

    Raises:
        ConfigError: if one was not sent, and does not exist here.
    """
    for folder, files in packed.items():
        if files is not None and folder not in _copies:
            copy = Path(tempfile.mkdtemp(prefix="task-", dir=own_folder())) / Path(folder).name
            archive = io.BytesIO(zlib.decompress(files))
            unpack(archive, copy, into_folder=True, max_bytes=MAX_SENT_MB << 20)
            _copies[folder] = copy
        here(folder)


def here(folder: str) -> Path:
    """Return the folder of this machine that a row names, which may be a copy.

    Raises:
        ConfigError: if there is none.
    """
    found = _copies.get(folder, Path(folder))
    if not found.is_dir():
        raise ConfigError(
            f"the task folder {folder} is not on {socket.gethostname()}: tasks of more than {MAX_SENT_MB} MiB together "
            "are not sent to the nodes of a cluster; put them on a disk that all nodes have under the same path"
        )
    return found
