"""One framework's agent, run as its user runs it: a program in its own environment that knows only a URL."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

from rllm.capture import side_calls
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.sdk import ProgramResult, environment, run_program
from rllm.store.memory import MemoryTraceStore
from rllm.trainer.sequences import sequences_of
from rllm.types import DRIFT_KEY, Episode, Step, Trace

from .forced_engine import ForcedEngine, Request, Script
from .shopping import THINKING, Mood, Shopper, Speech

ROOT = Path(__file__).parents[2]
EXAMPLES, INSTALLED = ROOT / "examples" / "frameworks", ROOT / ".frameworks"
TIMEOUT_S = 240.0
"""Some frameworks take ten seconds to import, on an idle machine."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A folder of `examples/frameworks`, and the command of its agent."""

    name: str
    package: str
    """Package whose version the table shows."""

    @property
    def python(self) -> Path:
        installed = INSTALLED / self.name / "installed.txt"  # written when the installation is complete
        assert installed.exists(), f"{self.name} is not installed: run `make test-frameworks FRAMEWORK={self.name}`"
        return installed.parent / "bin" / "python"

    @property
    def version(self) -> str | None:
        """Installed version of the package; `None` if it is not installed."""
        described = INSTALLED / self.name / "node_modules" / self.package / "package.json"
        if described.exists():
            return str(json.loads(described.read_text())["version"])
        packages = [str(path) for path in (INSTALLED / self.name).glob("lib/python*/site-packages")]
        return next((found.version for found in distributions(name=self.package, path=packages)), None)

    @property
    def variables(self) -> dict[str, str]:
        """`PATH` that begins with the folders of its programs."""
        folders = [INSTALLED / self.name / "bin", INSTALLED / self.name / "node_modules" / ".bin"]
        return {"PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]])}

    def command(self, way: str) -> list[str]:
        return [str(self.python), str(EXAMPLES / self.name / "agent.py"), way]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Result of one run of an agent."""

    session_id: str
    store: MemoryTraceStore
    sampled: Sequence[Request]
    """Outputs of the sampler, in call order."""
    program: ProgramResult

    @cached_property
    def traces(self) -> list[Trace]:
        return self.store.by_session(self.session_id)

    @cached_property
    def side_calls(self) -> dict[str, str]:
        return side_calls(self.traces)

    @cached_property
    def turns(self) -> list[Trace]:
        """The traces that are trained on."""
        return [trace for trace in self.traces if trace.id not in self.side_calls]


def num_sequences_of(turns: Sequence[Trace]) -> int:
    """Return the number of token sequences that the trainer makes of calls; 1 is one uninterrupted conversation."""
    steps = [Step(id=trace.id) for trace in turns]
    for step, trace in zip(steps, turns, strict=True):
        step.fill_from(trace)
    return len(sequences_of(steps))


def drifts_of(turns: Sequence[Trace]) -> list[str]:
    """Return the reasons why calls do not continue the tokens before them, each once."""
    return sorted({trace.metadata[DRIFT_KEY] for trace in turns if DRIFT_KEY in trace.metadata})


@dataclass(frozen=True)
class Served:
    """A gateway over the engine, for one run."""

    gateway: GatewayServer
    store: MemoryTraceStore
    home: Path


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of an agent, before it is started."""

    command: Sequence[str]
    mood: Mood = THINKING
    speech: Speech = field(default_factory=Speech)
    script: Script | None = None
    """Answers of the model, if it is not a shopper."""
    variables: Mapping[str, str] = field(default_factory=dict)

    files: Mapping[str, str] = field(default_factory=dict)
    """Files in its working directory."""

    def __call__(self, engine: ForcedEngine, session_id: str) -> Rollout:
        with self._served(engine) as served:
            session = environment(served.gateway.open_session(session_id))
            done = self._run(self.command, served, session)
        return Rollout(session_id=session_id, store=served.store, sampled=engine.sampled, program=done)

    def by_rllm_run(self, engine: ForcedEngine, session_id: str) -> tuple[Rollout, Episode]:
        """Run an agent with `rllm run`, in a process that knows only the gateway; return its episode, too."""
        with self._served(engine) as served:
            options = ["--gateway", served.gateway.url, "--session", session_id, "--out", "episode.json"]
            command = [sys.executable, "-m", "rllm", "run", *options, "--", *self.command]
            done = self._run(command, served, {})
            assert done.exit_code == 0, done.stderr
            episode = Episode.from_dict(json.loads((served.home / "episode.json").read_text()))
        return Rollout(session_id=session_id, store=served.store, sampled=engine.sampled, program=done), episode

    @contextmanager
    def _served(self, engine: ForcedEngine) -> Iterator[Served]:
        engine.script = self.script or Shopper(mood=self.mood, speech=self.speech)
        engine.sampled = []
        store = MemoryTraceStore()
        config = GatewayConfig(shutdown_timeout_s=1.0)
        with (
            GatewayServer(store, EngineUpstream(engine, "policy"), config) as gateway,
            TemporaryDirectory() as home,
        ):
            for name, text in self.files.items():
                (Path(home) / name).parent.mkdir(exist_ok=True)
                (Path(home) / name).write_text(text)
            yield Served(gateway, store, Path(home))

    def _run(self, command: Sequence[str], served: Served, session: Mapping[str, str]) -> ProgramResult:
        # A home without the settings of the user who runs the tests.
        own = {"HOME": str(served.home), "PYTHONPATH": "", **self.variables}
        return run_program(command, timeout_s=TIMEOUT_S, cwd=served.home, env={**session, **own})
