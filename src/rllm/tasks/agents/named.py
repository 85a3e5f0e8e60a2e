"""Agents for sandboxes by name: `open_agent("codex")`.

To add a program, add its row to `programs.PROGRAMS`; other agents are classes with a row in `AGENTS`, or functions of
this process, which receive the sandbox.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rllm._runtime.threads import in_thread
from rllm.errors import AgentError, ConfigError, boundary
from rllm.registry import did_you_mean, load_function
from rllm.sandbox import ExecResult, Sandbox
from rllm.tasks.agents.programs import PROGRAMS
from rllm.tasks.agents.terminus import Terminus
from rllm.tasks.check import Oracle
from rllm.tasks.task import SandboxAgent

T = TypeVar("T")

PARAMETERS = ("instruction", "sandbox", "base_url", "api_key", "model", "timeout_s")
"""Parameters that a function may have, in any order."""


class SandboxView:
    """A sandbox for code without async: the same methods, which wait for the result."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._loop = asyncio.get_running_loop()
        self.id = sandbox.id
        self.workdir = sandbox.workdir

    def exec(self, command: Any, **options: Any) -> ExecResult:
        """Run a command to its end; see `Sandbox.exec`."""
        return self._wait(self._sandbox.exec(command, **options))

    def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder into the sandbox; see `Sandbox.upload`."""
        self._wait(self._sandbox.upload(source, target))

    def download(self, source: str, target: Path, **options: Any) -> None:
        """Copy a file or folder from the sandbox; see `Sandbox.download`."""
        self._wait(self._sandbox.download(source, target, **options))

    def open_route(self, url: str) -> str:
        """Let the sandbox reach one server; see `Sandbox.open_route`."""
        return self._wait(self._sandbox.open_route(url))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class FunctionAgent(SandboxAgent):
    """`def f(instruction, sandbox)`, sync or async, which works on a task; what it returns is ignored."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Check its parameters.

        Raises:
            ConfigError: if it requires one that is not among `PARAMETERS`.
        """
        self.name = name
        self._function = function
        own = inspect.signature(function).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own)
        self._wanted = PARAMETERS if takes_any else tuple(parameter.name for parameter in own)
        unknown = [parameter.name for parameter in own if parameter.default is parameter.empty]
        unknown = [each for each in unknown if each not in PARAMETERS and not takes_any]
        if unknown:
            raise ConfigError(
                f"agent={name}: its parameter {unknown[0]!r} is not known: a function that works in a sandbox is given "
                f"{', '.join(PARAMETERS)}"
            )

    async def run(self, instruction: str, sandbox: Sandbox, **others: Any) -> None:
        """Call the function; a sync one in a thread, with a `SandboxView`."""
        is_async = inspect.iscoroutinefunction(self._function)
        known: Mapping[str, Any] = {
            "instruction": instruction,
            "sandbox": sandbox if is_async else SandboxView(sandbox),
            **others,
        }
        call = partial(self._function, **{name: known[name] for name in self._wanted if name in known})
        with boundary(AgentError, self.name):
            if is_async:
                await call()
            else:
                await in_thread(call, name=f"agent {self.name}")


class Agent(NamedTuple):
    """An agent that works in this process."""

    create: Callable[..., SandboxAgent]
    about: str
    options: Mapping[str, object] = {}


AGENTS: dict[str, Agent] = {
    "terminus": Agent(Terminus, "answers with one shell command after the other, in this process"),
    "oracle": Agent(Oracle, "runs the task's own solution; needs no model"),
    "terminus-tools": Agent(Terminus, "terminus for models with tools: calls the tool shell", {"tools": True}),
}


def agent_names() -> dict[str, str]:
    """Return all names, with a line about each."""
    programs = {
        name: f"{'PyPI' if program.python else 'npm'}: {program.package} {program.version}, unedited"
        for name, program in PROGRAMS.items()
    }
    return {name: agent.about for name, agent in AGENTS.items()} | programs


def open_agent(spec: str, *, max_steps: int | None = None) -> SandboxAgent:
    """Return an agent.

    Args:
        spec: a name of `agent_names`, to which a version of a program may be added (`codex@0.170.0`), or
            `FILE.py:function`, a function that receives the sandbox (see `FunctionAgent`).
        max_steps: commands in a rollout of terminus.

    Raises:
        ConfigError: if it is unknown, or cannot work on this machine.
    """
    name, _, version = spec.partition("@")
    if spec in AGENTS:
        found = AGENTS[spec]
        return found.create(**found.options, **({} if max_steps is None else {"max_steps": max_steps}))
    if max_steps is not None:
        raise ConfigError(f"max_steps={max_steps} would have no effect with agent={spec}, which ends by itself")
    if name in PROGRAMS:
        program = replace(PROGRAMS[name], version=version or PROGRAMS[name].version)
        program.check()
        return program
    if ":" in spec:
        return FunctionAgent(load_function(spec, reload=False), spec)
    known = agent_names()
    hint = did_you_mean(spec, known) or f"use one of {', '.join(known)}, or FILE.py:function"
    raise ConfigError(f"agent={spec!r} is not known: {hint}")
