"""Coding agents that are programs: installed on this machine once, mounted into sandboxes, and run there unedited."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template

from rllm._runtime.files import cache_folder, whole_folder
from rllm._runtime.threads import in_thread
from rllm.errors import AgentError, ConfigError, last_lines
from rllm.sandbox import Sandbox
from rllm.sdk.variables import gateway_variables
from rllm.tasks.task import SandboxAgent

logger = logging.getLogger(__name__)

_HOME = "/tmp/agent-home"
"""Home of the program in the sandbox, outside of the task's folder."""
_INSTALL_TIMEOUT_S = 900.0
_MAX_OUTPUT = 20_000
_NODE = "node@22.23.3"
"""Package of npm with the program `node`, so that an image need not have it."""


@dataclass(frozen=True, kw_only=True)
class Program(SandboxAgent):
    """A program that works on a task by itself, with model calls to the gateway.

    In `command`, `variables` and `files`, `$instruction`, `$model`, `$url` (with `/v1`) and `$python` are replaced;
    the last is code that makes the installed Python packages importable.
    """

    name: str = ""
    installs_into_image = False
    package: str
    """Package of npm, or of PyPI if `python` is set."""
    version: str
    command: tuple[str, ...]
    python: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those that lead model clients to the gateway."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files in its home."""

    def check(self) -> None:
        """Raise `ConfigError` if it cannot be installed from this machine."""
        if not self.python and shutil.which("npm") is None:
            raise ConfigError(f"agent={self.name} is installed by npm, which is missing: install Node.js 20 or newer")

    @property
    def mounts(self) -> Mapping[str, Path]:
        """Return its folder on this machine, whose content appears in running sandboxes as soon as it is installed."""
        folder = cache_folder() / "agents" / f"{self.name}-{self.version}"
        folder.mkdir(parents=True, exist_ok=True)
        return {f"/opt/rllm/{self.name}": folder}

    async def install(self, sandbox: Sandbox) -> None:
        """Install it on this machine, if that was not done before."""
        await self._place(sandbox)

    async def run(
        self, instruction: str, sandbox: Sandbox, *, base_url: str, api_key: str, model: str, timeout_s: float
    ) -> None:
        """Run it until it ends or `timeout_s` has passed; the verifier then judges what it has done.

        Raises:
            AgentError: if it ends with an exit code other than 0.
        """
        place = await self._place(sandbox)
        url = await sandbox.open_route(base_url)
        led = gateway_variables(url)
        led |= {name: api_key for name in led if name.endswith("_API_KEY")}
        code = f"import sys; sys.path.insert(0, {place!r})"
        values = {"instruction": instruction, "model": model, "url": url, "python": code}
        for name, text in self.files.items():
            file = f"{_HOME}/{name}"
            write = ["sh", "-c", 'mkdir -p "${0%/*}" && cat > "$0"', file]
            written = await sandbox.exec(write, input=Template(text).substitute(values))
            if not written.ok:
                raise AgentError(f"{self.name}: {file} cannot be written in the sandbox: {written.stderr.strip()}")
        path = f"{place}/node_modules/.bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {name: Template(value).substitute(values) for name, value in self.variables.items()}
        done = await sandbox.exec(
            [Template(part).substitute(values) for part in self.command],
            env={**led, "HOME": _HOME, "PATH": path, **own},
            timeout_s=timeout_s,
            max_output_bytes=_MAX_OUTPUT,
        )
        if done.exit_code and not done.timed_out:
            raise AgentError(f"{self.name} ended with exit code {done.exit_code}: {last_lines(done.output)}")

    async def _place(self, sandbox: Sandbox) -> str:
        """Install it if need be, and return its folder in the sandbox; packages of PyPI fit the image's Python.

        Raises:
            AgentError: if it cannot be installed.
        """
        kind = "node"
        if self.python:
            found = await sandbox.exec(["python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"])
            if not found.ok:
                raise AgentError(
                    f"agent={self.name} needs python3 in the image, which has none: add it to the Dockerfile"
                )
            kind = found.stdout.strip()
        [(place, folder)] = self.mounts.items()
        await in_thread(partial(self._ensure_installed, folder / kind), name=f"install {self.name}")
        return f"{place}/{kind}"

    def _ensure_installed(self, folder: Path) -> None:
        """Install it if it is missing; this process does not repeat a failed installation."""
        with _installing:
            if folder in _failures:
                raise AgentError(_failures[folder])
            if folder.exists():
                return
            logger.warning("installing %s %s (once) into %s", self.name, self.version, folder)
            try:
                self._install(folder)
            except (OSError, subprocess.SubprocessError) as error:
                output = last_lines(str(getattr(error, "stderr", None) or error))
                _failures[folder] = f"agent={self.name} {self.version} cannot be installed: {output}"
                raise AgentError(_failures[folder]) from None  # the message has the output of npm or pip

    def _install(self, folder: Path) -> None:
        with whole_folder(folder) as target:
            target.mkdir()
            if self.python:
                version = folder.name.removeprefix("python")
                quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
                platform = ("--python-version", version, "--implementation", "cp", "--only-binary=:all:")
                packages = ("--target", str(target), f"{self.package}=={self.version}")
                command = [sys.executable, "-m", "pip", "install", *quiet, *platform, *packages]
            else:
                quiet = ("--no-audit", "--no-fund", "--loglevel=error")
                command = ["npm", "install", *quiet, "--prefix", str(target), f"{self.package}@{self.version}", _NODE]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)


_installing = threading.Lock()
_failures: dict[Path, str] = {}


PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        Program(
            name="claude-code",
            package="@anthropic-ai/claude-code",
            version="2.1.331",
            command=("claude", "--print", "$instruction", "--model", "$model", "--dangerously-skip-permissions"),
            variables={"IS_SANDBOX": "1"},
        ),
        Program(
            name="codex",
            package="@openai/codex",
            version="0.169.0",
            command=(
                *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
                "$instruction",
            ),
            variables={"CODEX_HOME": f"{_HOME}/.codex"},
            files={
                ".codex/config.toml": """\
model = "$model"
model_provider = "gateway"

[model_providers.gateway]
name = "gateway"
base_url = "$url"
env_key = "OPENAI_API_KEY"
"""
            },
        ),
        Program(
            name="mini-swe-agent",
            package="mini-swe-agent",
            version="2.4.6",
            python=True,
            command=(
                *("python3", "-c", "$python; from minisweagent.run.mini import app; app()"),
                *("--model", "openai/$model", "--task", "$instruction", "--yolo", "--exit-immediately"),
            ),
        ),
        Program(
            name="opencode",
            package="opencode-ai",
            version="1.18.33",
            command=("opencode", "run", "--model", "gateway/$model", "$instruction"),
            variables={"OPENCODE_CONFIG": f"{_HOME}/opencode.json"},
            files={
                "opencode.json": """\
{
  "provider": {"gateway": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$url", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"$model": {"tool_call": true, "limit": {"context": 131072, "output": 8192}}}
  }},
  "autoupdate": false,
  "share": "disabled"
}
"""
            },
        ),
        Program(
            name="qwen-code",
            package="@qwen-code/qwen-code",
            version="0.24.4",
            command=(
                *("qwen", "--auth-type", "openai", "--model", "$model", "--approval-mode", "yolo"),
                *("--prompt", "$instruction"),
            ),
            files={".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}}\n'},
        ),
    )
}
