"""A training run of one side, as a separate process: its settings are passed as JSON, and its costs returned."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Side = Literal["rllm", "TRL"]
FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Job:
    side: Side
    model: str
    """Folder of the policy that training starts from."""
    device: str = "cpu"
    workload: str
    num_steps: int
    target: float | None = None
    """Held-out accuracy at which to stop; rewards are then for right answers."""
    most_cpu_s: float | None = None
    """CPU-seconds after which to stop."""
    lr: float = 1e-5
    seed: int = 0
    threads: int = 1
    peer_rows: int | None = None
    """Answers in one micro-batch of TRL; `None` for all answers of a turn."""
    autocast: bool = False
    """True if matrix products of the update are computed in bfloat16."""


def run_job(job: Job, peer_python: str, on_news: Callable[[str], None] = lambda news: None) -> dict[str, Any]:
    """Run a job and return its costs; see `watch.Watch.summary`. `on_news` is called after each test of the policy."""
    python = sys.executable if job.side == "rllm" else str(Path(peer_python).absolute())
    command = [python, "-m", "against_trl", json.dumps(asdict(job))]
    message: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=FOLDER, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "news" in message:
                on_news(message["news"])
        if process.wait() != 0:
            errors.seek(0)
            raise SystemExit(f"{job} failed:\n{errors.read()[-3000:]}")
    return message


def has_peer(peer_python: str) -> bool:
    """Return True if TRL's Python exists; otherwise print how to install it."""
    if Path(peer_python).exists():
        return True
    print(
        f"TRL is not measured, because there is no {peer_python}. To make it:\n"
        "    python -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0 trl==1.16.0",
        file=sys.stderr,
    )
    return False
