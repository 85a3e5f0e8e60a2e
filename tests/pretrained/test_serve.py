"""`rllm serve` with a pretrained model: turns of a conversation, streamed and not, are stored with exact tokens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from rllm.store import open_store
from rllm.types import DRIFT_KEY

pytestmark = pytest.mark.pretrained


def test_conversation_is_one_sequence_of_exact_tokens(smollm: Path, reference: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rllm", "serve", str(smollm), "--port", "0", "--store", "said.db"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"(http://\S+)/v1", line) for line in process.stdout)))
        with OpenAI(base_url=f"{found[1]}/sessions/s/v1", api_key="none", timeout=600) as client:
            messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
            for question in ("And of Italy?", "And of Spain?", ""):
                asked: Any = {"model": "policy", "messages": messages, "max_tokens": 24}
                if question:
                    answer = client.chat.completions.create(**asked).choices[0].message.content or ""
                else:
                    pieces = list(client.chat.completions.create(**asked, stream=True))
                    answer = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
                assert answer
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    with open_store(str(tmp_path / "said.db"), read_only=True) as store:
        turns = store.by_session("s")
    assert len(turns) == 3
    for one, other in pairwise(turns):
        known = [*one.prompt_ids, *one.response_ids]
        assert other.prompt_ids[: len(known)] == known
    for turn in turns:
        assert DRIFT_KEY not in turn.metadata
        ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]])
        with torch.no_grad():
            logprobs = reference(ids).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(turn.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=1e-4, rtol=0)
