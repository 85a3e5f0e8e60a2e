"""`rllm serve MODEL model.engine=vllm`: a real vLLM behind the gateway's routes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from rllm.store import open_store

from .conftest import ARGUMENTS, Servers

pytestmark = pytest.mark.vllm


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process at the end, so that a failed assertion does not wait for it."""
    try:
        yield
    finally:
        process.kill()


def test_calls_of_a_served_model_are_stored(servers: Servers, vllm_command: str, tmp_path: Path) -> None:
    servers.close()
    settings = ["model.engine=vllm", f"vllm.command={vllm_command}", f"vllm.args=[{','.join(ARGUMENTS)}]"]
    command = [sys.executable, "-m", "rllm", "serve", str(servers.folder / "model"), *settings, "model.device=cpu"]
    command += ["--port", "0", "--store", "said.db"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process, killed(process):
        assert process.stdout is not None
        assert "said.db" in process.stdout.readline()
        assert "vllm.log" in process.stdout.readline()
        greeting = process.stdout.readline()
        address = re.search(r"http://\S+/v1", greeting)
        assert address, (tmp_path / "vllm.log").read_text()[-3000:]
        with OpenAI(base_url=address.group(), api_key="none", timeout=120) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            asked = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "the user asks"}]}
            whole = client.chat.completions.create(**asked, seed=1)
            pieces = list(client.chat.completions.create(**asked, seed=1, stream=True))
        answer = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert answer == whole.choices[0].message.content
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert rest.endswith("stopped\n")
    with open_store(str(tmp_path / "said.db"), read_only=True) as store:
        traces = [trace for session in store.sessions() for trace in store.by_session(session.id)]
    assert len(traces) == 2
    for trace in traces:
        assert (len(trace.response_ids), trace.logprobs_kind) == (5, "processed")
        ids = torch.tensor([[*trace.prompt_ids, *trace.response_ids]])
        with torch.no_grad():
            expected = servers.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(trace.logprobs), expected[-5:], atol=1e-4, rtol=0)
