"""`kill -9` of the gateway, its upstreams and the agents under load, a full disk and a locked database, in any order: no call
is lost whose answer was read."""

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from rllm.store import open_store
from rllm.testing.scripted import TURN_END

from ..ports import free_port

UPSTREAM, AGENTS = (str(Path(__file__).with_name(f"program_{name}.py")) for name in ("upstream", "agents"))
TIMEOUT_S = 300
NUM_RUNS = int(os.environ.get("RLLM_KILL_RUNS", "1"))
"""Each in a different order and at other times; `make test-kills` has 100."""


class Process:
    """A process that is killed and started again, and the lines that it has printed."""

    def __init__(self, *command):
        self.command = [sys.executable, *command]
        self.lines = []
        self.start()

    def start(self):
        self._process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline(), self.command
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self):
        return self._process.pid

    def _read(self):
        for line in self._process.stdout:
            if line.endswith("\n"):  # A kill may have truncated the last one.
                self.lines.append(line)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


class Agents(Process):
    """Agents with new sessions each time they are started."""

    num_starts = 0

    def start(self):
        self.num_starts += 1
        self.command[-1] = f"run{self.num_starts}"
        super().start()


def wait_for_calls(agents, num_calls):
    """Wait until this number of further calls are answered."""
    wanted, deadline = len(agents.lines) + num_calls, time.monotonic() + TIMEOUT_S
    while len(agents.lines) < wanted:
        assert time.monotonic() < deadline, f"calls are no longer answered: {len(agents.lines)} of {wanted}"
        time.sleep(0.005)


class Run:
    """Agents, a gateway and a pool of two inference servers, with all their failures."""

    def __init__(self, stack, folder, rng):
        self.rng = rng
        self.database = folder / "traces.db"
        ports = [free_port() for _ in range(2)]
        self.upstreams = [self._started(stack, Process(UPSTREAM, str(port))) for port in ports]
        port = free_port()
        replicas = [word for other in ports for word in ("--upstream", f"http://127.0.0.1:{other}/v1")]
        store = ("--store", f"sqlite:///{self.database}")
        self.gateway = self._started(stack, Process("-m", "rllm", "gateway", *replicas, "--port", str(port), *store))
        self.agents = self._started(stack, Agents(AGENTS, f"http://127.0.0.1:{port}", "run1"))
        self.disasters = [
            partial(self.restart, self.gateway),
            partial(self.restart, self.agents),
            *(partial(self.restart, upstream) for upstream in self.upstreams),
            self.fill_disk,
            self.lock_database,
        ]

    @staticmethod
    def _started(stack, process):
        stack.callback(process.kill)
        return process

    def restart(self, victim):
        victim.kill()
        victim.start()

    def fill_disk(self):
        """Limit the size of the gateway's files for a while: writes beyond fail with `EFBIG`."""
        files = [self.database, self.database.with_name("traces.db-wal")]
        size = min(path.stat().st_size for path in files if path.exists())
        resource.prlimit(self.gateway.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        self.pause(0.3)
        resource.prlimit(self.gateway.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def lock_database(self):
        """Hold the lock of a long write in another process."""
        with closing(sqlite3.connect(self.database, isolation_level=None, timeout=TIMEOUT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            self.pause(0.3)
            connection.execute("ROLLBACK")

    def pause(self, at_most_s):
        time.sleep(self.rng.random() * at_most_s)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_acknowledged_calls_are_never_lost(tmp_path, seed):
    rng = random.Random(seed)
    with ExitStack() as stack:
        run = Run(stack, tmp_path, rng)
        for disaster in rng.sample(run.disasters, len(run.disasters)):
            wait_for_calls(run.agents, rng.randrange(1, 60))
            run.pause(0.01)
            disaster()
        wait_for_calls(run.agents, 20)
    acknowledged = [line.split() for line in run.agents.lines]
    with open_store(str(run.database)) as store:
        traces = {
            trace.id: trace
            for session_id in {session_id for session_id, _, _ in acknowledged}
            for trace in store.by_session(session_id)
        }
    assert len({trace_id for _, trace_id, _ in acknowledged}) == len(acknowledged)
    for session_id, trace_id, question in acknowledged:
        trace = traces[trace_id]
        assert (trace.session_id, trace.messages[-1]["content"]) == (session_id, question)
        assert trace.response_ids == [*f"answer to {question}".encode(), TURN_END]
        assert len(trace.logprobs) == len(trace.response_ids)
        assert trace.error is None
