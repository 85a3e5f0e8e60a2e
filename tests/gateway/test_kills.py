"""`kill -9` of the gateway, the upstream and the agents under load, in any order: no call is lost whose answer was read."""

import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rllm.store import open_store
from rllm.testing.scripted import TURN_END

from ..ports import free_port

PROGRAMS = str(Path(__file__).with_name("programs.py"))
TIMEOUT_S = 300


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

    def _read(self):
        for line in self._process.stdout:
            if line.endswith("\n"):  # A kill may have cut off the last one.
                self.lines.append(line)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


class Agents(Process):
    """Agents with sessions of their own each time they are started."""

    num_starts = 0

    def start(self):
        self.num_starts += 1
        self.command[-1] = f"run{self.num_starts}"
        super().start()


def wait_for_calls(agents, num_calls):
    """Let so many more calls be answered."""
    wanted, deadline = len(agents.lines) + num_calls, time.monotonic() + TIMEOUT_S
    while len(agents.lines) < wanted:
        assert time.monotonic() < deadline, f"no answers any more: {len(agents.lines)} of {wanted}"
        time.sleep(0.005)


@pytest.mark.parametrize("num_rounds", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_no_acknowledged_call_is_lost(tmp_path, num_rounds):
    rng = random.Random(num_rounds)
    database = f"sqlite:///{tmp_path / 'traces.db'}"
    upstream_port, port = free_port(), free_port()
    gateway_command = ["-m", "rllm", "gateway", "--upstream", f"http://127.0.0.1:{upstream_port}/v1"]
    with ExitStack() as stack:
        upstream = Process(PROGRAMS, "upstream", str(upstream_port))
        stack.callback(upstream.kill)
        gateway = Process(*gateway_command, "--port", str(port), "--store", database)
        stack.callback(gateway.kill)
        agents = Agents(PROGRAMS, "agents", f"http://127.0.0.1:{port}", "run1")
        stack.callback(agents.kill)
        victims = [gateway, upstream, agents]
        for number in range(num_rounds):
            wait_for_calls(agents, rng.randrange(1, 60))
            time.sleep(rng.random() * 0.01)
            victim = victims[number] if number < 3 else rng.choice(victims)
            victim.kill()
            victim.start()
        wait_for_calls(agents, 20)
    acknowledged = [line.split() for line in agents.lines]
    with open_store(database) as store:
        traces = {
            trace.id: trace
            for session_id in {session_id for session_id, _, _ in acknowledged}
            for trace in store.by_session(session_id)
        }
    assert len(acknowledged) > 10 * num_rounds
    for session_id, trace_id, question in acknowledged:
        trace = traces[trace_id]
        assert (trace.session_id, trace.messages[-1]["content"]) == (session_id, question)
        assert trace.response_ids == [*f"answer to {question}".encode(), TURN_END]
        assert len(trace.logprobs) == len(trace.response_ids)
        assert trace.error is None
