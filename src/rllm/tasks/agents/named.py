"""Agents for sandboxes by name: `open_agent("codex")`.

To add a program, add its row to `programs.PROGRAMS`; other agents are classes with a row in `AGENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rllm.errors import ConfigError
from rllm.registry import did_you_mean, load_function
from rllm.tasks.agents.functions import FunctionAgent
from rllm.tasks.agents.programs import PROGRAMS, program_named
from rllm.tasks.agents.terminus import Terminus
from rllm.tasks.oracle import Oracle
from rllm.tasks.task import SandboxAgent


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
        spec: a name of `agent_names`, a program's with a version of it (`codex@0.170.0`), or `FILE.py:function` of a
            function that receives the sandbox (see `FunctionAgent`).
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
        program = program_named(name, version)
        program.check()
        return program
    if ":" in spec:
        return FunctionAgent(load_function(spec, reload=False), spec)
    known = agent_names()
    hint = did_you_mean(spec, known) or f"use one of {', '.join(known)}, or FILE.py:function"
    raise ConfigError(f"agent={spec!r} is not known; {hint}")
