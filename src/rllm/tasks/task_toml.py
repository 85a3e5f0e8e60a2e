"""Fields of `task.toml`, in Harbor's format: versions 1.0 to 1.4, as the package harbor 0.26 reads them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rllm.errors import ConfigError, shown
from rllm.registry import closest
from rllm.types import JSONObject

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _mebibytes(value: object) -> object:
    """Return the mebibytes of a size such as `2G`, the form of version 1.0; other values as they are."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])\s*", value.upper())):
        return int(float(found[1]) * _SIZES[found[2]])
    return value


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mebibytes = Annotated[int, BeforeValidator(_mebibytes), Field(gt=0)]


class _Table(BaseModel):
    """A table; keys that Harbor does not define are kept, to be named."""

    model_config = ConfigDict(extra="allow")


class _Phase(_Table):
    """Fields that `[agent]`, `[verifier]` and `[environment]` have in common."""

    env: dict[str, str] = Field(default_factory=dict)
    user: Literal["root", 0] | None = None
    """Only root, because commands run as the user of the image."""
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class AgentTable(_Phase):
    """`[agent]`. Harbor stops no agent without `timeout_sec`; here each has a deadline."""

    timeout_sec: Seconds = 600.0


class VerifierTable(_Phase):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    environment_mode: Literal["shared", "separate"] | None = None
    environment: JSONObject | None = None
    collect: list[JSONObject] = Field(default_factory=list)


class EnvironmentTable(_Phase):
    """`[environment]`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    workdir: str | None = None
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Mebibytes | None = Field(default=None, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: Mebibytes | None = Field(default=None, validation_alias=AliasChoices("storage_mb", "storage"))
    os: Annotated[Literal["linux"], BeforeValidator(lambda value: str(value).lower())] = "linux"
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: JSONObject | None = None
    mcp_servers: list[JSONObject] = Field(default_factory=list)
    skills_dir: str | None = None
    healthcheck: JSONObject | None = None
    allow_internet: bool | None = None


class SolutionTable(_Table):
    """`[solution]`."""

    env: dict[str, str] = Field(default_factory=dict)


class PackageTable(_Table):
    """`[task]`, of which only the name has an effect."""

    name: str = Field(min_length=1)


class TaskToml(_Table):
    """A whole `task.toml`."""

    schema_version: str = Field(default=VERSIONS[-1], validation_alias=AliasChoices("schema_version", "version"))
    task: PackageTable | None = None
    metadata: JSONObject = Field(default_factory=dict)
    agent: AgentTable = Field(default_factory=AgentTable)
    verifier: VerifierTable = Field(default_factory=VerifierTable)
    environment: EnvironmentTable = Field(default_factory=EnvironmentTable)
    solution: SolutionTable = Field(default_factory=SolutionTable)
    artifacts: list[str | JSONObject] = Field(default_factory=list)
    steps: list[JSONObject] | None = None
    multi_step_reward_strategy: str | None = None
    source: str | None = None

    @property
    def artifact_paths(self) -> tuple[str, ...]:
        """Return the paths of all artifacts."""
        return tuple(item if isinstance(item, str) else str(item.get("source", "")) for item in self.artifacts)


def read_toml(path: Path) -> TaskToml:
    """Return the fields of a `task.toml`.

    Raises:
        ConfigError: if a field is wrong; the message has the file, each wrong field, its value and the remedy.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        found = TaskToml.model_validate(values)
    except ValidationError as error:
        lines = (
            f"{path}: {'.'.join(map(str, item['loc']))}={shown(item['input'])}: {item['msg']}"
            for item in error.errors()
        )
        raise ConfigError("\n".join(lines)) from None
    problems = [f"{path}: {problem}" for problem in _unsupported(found)]
    if problems:
        raise ConfigError("\n".join(problems))
    return found


_UNSUPPORTED = {
    "steps": "tasks of several steps are not supported: make a task of each step",
    "agent.env": "use environment.env, whose variables the commands of agent and verifier have",
    "environment.gpus": "sandboxes have no accelerators: leave it out",
    "environment.tpu": "sandboxes have no accelerators: leave it out",
    "environment.mcp_servers": "sandboxes start no servers: let the agent start them",
    "environment.healthcheck": "sandboxes start no services to wait for: leave it out",
    "verifier.environment": "use environment_mode='separate' with tests/Dockerfile, or the task's own image",
    "verifier.collect": "no command runs between agent and verifier: leave it out",
}
"""Fields that would change the task if they were ignored, each with the remedy."""


def _unsupported(task: TaskToml) -> Iterator[str]:
    """Yield each feature that a task asks for and that is not supported, with the remedy."""
    if task.schema_version not in VERSIONS:
        yield f"schema_version={task.schema_version!r} is not known: use one of {', '.join(VERSIONS)}"
    for name, remedy in _UNSUPPORTED.items():
        table, _, field = name.rpartition(".")
        if value := getattr(getattr(task, table) if table else task, field):
            yield f"{name}={shown(value)}: {remedy}"
    if task.environment.workdir and not task.environment.workdir.startswith("/"):
        yield f"environment.workdir={task.environment.workdir!r}: use an absolute path in the sandbox"
    if task.verifier.environment_mode == "shared":
        yield (
            "verifier.environment_mode='shared': the verifier always has a sandbox of its own: leave this out, and "
            "list paths outside the working directory that it needs in artifacts=[...]"
        )
    for table in ("environment", "verifier", "solution"):
        for key, value in getattr(task, table).env.items():
            if re.search(r"\$\{\w++(?::-[^{}]*+)?\}", value):
                yield f"{table}.env.{key}={value!r}: variables of this machine do not reach sandboxes: write the value"
    yield from filter(None, map(_problem_of_artifact, task.artifact_paths, task.artifacts))


def _problem_of_artifact(path: str, item: str | JSONObject) -> str | None:
    if not path or ".." in PurePosixPath(path).parts:
        return f"artifacts={shown(item)}: use absolute paths in the sandbox"
    place = PurePosixPath("/", path)
    if str(place) in ("/", "/logs") or any(place.is_relative_to(own) for own in ("/tests", "/logs/verifier")):
        return f"artifacts={path!r}: the verifier's own files do not come from the agent's sandbox"
    if not isinstance(item, str) and (item.get("exclude") or item.get("service") not in (None, "main")):
        return f"artifacts={shown(item)}: exclude and service are not supported: name the paths to copy"
    return None


def without_effect(task: TaskToml) -> Iterator[str]:
    """Yield fields that have no effect: keys that Harbor does not know, and a network, which no sandbox has."""
    named = {"": task, "agent": task.agent, "verifier": task.verifier, "environment": task.environment}
    for table, values in named.items():
        for key in values.model_extra or {}:
            meant = closest(key, list(type(values).model_fields))
            hint = f"; did you mean {meant!r}?" if meant else ""
            yield f"{'.'.join(filter(None, (table, key)))} is not a field of task.toml{hint}"
    for table in ("agent", "verifier", "environment"):
        mode = getattr(named[table], "network_mode", None)
        if mode not in (None, "no-network"):
            yield f"{table}.network_mode={mode!r}: sandboxes have no network"
    if task.environment.allow_internet:
        yield "environment.allow_internet=true: sandboxes have no network"
    if task.environment.skills_dir:
        yield "environment.skills_dir: agents are given no skills"
