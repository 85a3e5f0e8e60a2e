"""A task folder, an agent that works on it in a sandbox, and the outcome of its rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rllm.sandbox.base import ImageSource, Sandbox, SandboxLimits
from rllm.types import JSONMapping, JSONObject

MAX_TEXT = 4000
"""Characters kept of a verifier's output, of a diff and of a list of files."""


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """A task, as read from its folder. Agents see the instruction and the image, never `tests` or `solution`."""

    name: str
    """Name in `[task]`, or else the folder's name."""
    folder: Path
    instruction: str
    image: ImageSource
    """`environment/` with its Dockerfile, or the image that `task.toml` names."""
    verifier_image: ImageSource | None = None
    """Image of the verifier with `/tests` in it, if it has its own."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    workdir: str | None = None
    """Folder in which commands run, by default the image's."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of all commands in the agent's sandbox, and in the verifier's."""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 600.0
    """Seconds after which the agent is stopped; its work is verified nevertheless."""
    verifier_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    artifacts: tuple[str, ...] = ()
    """Absolute paths that the verifier gets from the agent's sandbox in addition to `workdir`."""
    metadata: JSONMapping = field(default_factory=dict)
    """Table `[metadata]` of `task.toml`."""

    @property
    def tests(self) -> Path:
        """Return the folder of the verifier, whose program is `test.sh`."""
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        """Return the folder of the solution, whose program is `solve.sh`; not all tasks have one."""
        return self.folder / "solution"


class SandboxAgent(ABC):
    """Agent that works in a sandbox. One object makes all rollouts, many of them at once."""

    name: str = ""
    """Name in messages, by default the class's name."""
    uses_model: bool = True
    """True if it calls the model: its calls are trained on, and a rollout without any has failed."""
    installs_into_image: bool = True
    """True if `install` writes to the sandbox, so that a snapshot helps; otherwise it only fills its `mounts`."""

    def check(self) -> None:  # noqa: B027
        """Raise `ConfigError` if it cannot work on this machine."""

    def for_task(self, task: TaskFolder) -> SandboxAgent:
        """Return the agent for one task, by default itself; the oracle needs more than the instruction."""
        return self

    @property
    def mounts(self) -> Mapping[str, Path]:
        """Return folders of this machine that the agent needs, by their paths in the sandbox; see `start`."""
        return {}

    async def install(self, sandbox: Sandbox) -> None:  # noqa: B027
        """Prepare an image: called once for agent and image if the backend has snapshots, otherwise in each sandbox.

        It runs before the instruction is known, and what it writes is not part of the agent's work.
        """

    @abstractmethod
    async def run(
        self, instruction: str, sandbox: Sandbox, *, base_url: str, api_key: str, model: str, timeout_s: float
    ) -> None:
        """Work on a task until it is done; cancelled after `timeout_s`.

        Args:
            instruction: text of the task.
            sandbox: where to work; `open_route(base_url)` lets programs in it reach the model.
            base_url: URL of the rollout's session, with `/v1`, as this process reaches it.
            api_key: key of that session.
            model: name of the model in requests.
            timeout_s: seconds that the agent has.

        Raises:
            AgentError: if it cannot work. A task that is not solved is not an error.
        """

    def __str__(self) -> str:
        return self.name or type(self).__name__


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A file in the working directory that the agent added, changed or removed."""

    path: str
    """Path relative to the working directory, with visible signs for control characters."""
    kind: Literal["added", "changed", "removed"]
    num_bytes: int
    """Size afterwards; 0 if removed."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + ("" if self.kind == "removed" else f" ({self.num_bytes:,} bytes)")


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """Outcome of a rollout, or what is known of one that failed."""

    reward: float | None = None
    """`None` if the rollout failed."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """All numbers of `reward.json`; empty for a single number."""
    changes: tuple[FileChange, ...] | None = None
    """`None` if the rollout failed before the files could be copied."""
    diff: str = ""
    """Unified diff of the text files changed, at most `MAX_TEXT` characters."""
    verifier_output: str = ""
    """End of the verifier's output, at most `MAX_TEXT` characters."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part: `start_s`, `agent_s`, `verifier_s`."""
    agent_timed_out: bool = False

    def verdict(self) -> JSONObject:
        """Return the facts that the viewer and `rllm explain` show, for the trajectory's `info[VERDICT_KEY]`."""
        changed = None if self.changes is None else "\n".join(map(str, self.changes))[:MAX_TEXT] or "none"
        shown: JSONObject = {
            "files changed": changed,
            "diff": self.diff,
            "verifier output": self.verifier_output,
            "seconds": ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in self.timings.items()),
            "agent": "stopped at its deadline" if self.agent_timed_out else "",
        }
        return {name: text for name, text in shown.items() if text}
