"""`rllm serve`: a real (tiny) model behind the gateway's routes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise

import httpx
import pytest

from rllm.store import open_store


@pytest.mark.slow
def test_run_is_served_and_its_calls_are_stored(work, policy):
    checkpoint = work / "run" / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    for file in policy.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    (checkpoint / "trainer_state.json").write_text('{"step": 3}')
    command = [sys.executable, "-m", "rllm", "serve", "run", "--port", "0", "--store", "said.db"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        loading = process.stdout.readline()
        assert loading.startswith("rllm serve: loading run/checkpoints/step-000003 (")
        assert loading.endswith("); traces are kept in said.db\n")
        greeting = process.stdout.readline()
        assert "run/checkpoints/step-000003" in greeting
        url = re.search(r"http://\S+/v1", greeting).group()
        body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.endswith("rllm serve: stopped\n")
    with open_store(str(work / "said.db"), read_only=True) as store:
        [session] = store.sessions()
        [trace] = store.by_session(session.id)
    assert len(trace.response_ids) == len(trace.logprobs) == 4


@pytest.mark.slow
def test_turns_through_a_gateway_with_tokenizer_are_one_sequence(work, policy):
    with ExitStack() as stack:

        def started(*arguments):
            command = [sys.executable, "-m", "rllm", *arguments, "--port", "0"]
            process = stack.enter_context(subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, text=True))
            stack.callback(process.send_signal, signal.SIGINT)
            return next(filter(None, (re.search(r"http://[^/\s]+", line) for line in process.stdout))).group()

        server = started("serve", str(policy), "--store", "behind.db")
        front = started("gateway", "--upstream", server, "--tokenizer", str(policy), "--store", "front.db")
        messages = [{"role": "user", "content": "How many figs?"}]
        for turn in range(3):
            body = {"model": "any", "max_tokens": 9, "seed": turn, "messages": messages}
            answer = httpx.post(f"{front}/sessions/s/v1/chat/completions", json=body, timeout=60).json()
            answers = answer["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": f"  {answers.strip()}\n"},
                {"role": "user", "content": "And limes?"},
            ]
    with open_store(str(work / "front.db"), read_only=True) as store:
        turns = store.by_session("s")
    with open_store(str(work / "behind.db"), read_only=True) as store:
        kept = [trace for session in store.sessions() for trace in store.by_session(session.id)]
    assert len(turns) == 3
    for one, other in pairwise(turns):
        known = [*one.prompt_ids, *one.response_ids]
        assert (other.prompt_ids[: len(known)], other.parent_id) == (known, one.id)
    kept.sort(key=lambda trace: trace.started_at)
    assert [(trace.prompt_ids, trace.response_ids, trace.logprobs) for trace in kept] == [
        (trace.prompt_ids, trace.response_ids, trace.logprobs) for trace in turns
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no such folder"),
        (["model", "optim.lr=1"], "optim.lr=1 would have no effect"),
        (["model", "model.pth=1"], "did you mean 'model.path'?"),
        (["model", "vllm.url=http://127.0.0.1:9/v1"], "rllm gateway --upstream"),
        (["model", "--host", "0.0.0.0"], "set an API key"),
        ([".", "vllm.port=9"], "vllm.port=9 would have no effect without a server; also set model.engine=vllm"),
        ([".", "model.engine=vllm", "vllm.sleep=always"], "vllm.sleep='always' would have no effect"),
        ([".", "model.lora_rank=8"], "model.lora_rank=8 would have no effect because nothing is trained here"),
    ],
)
def test_errors_name_the_mistake(work, fails, arguments, message):
    code, errors = fails("serve", *arguments)
    assert code == 2
    assert message in errors


def test_vllm_rejects_an_adapter_without_its_model(work, fails):
    (work / "adapter").mkdir()
    (work / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "model"}')
    code, errors = fails("serve", "./adapter", "--port", "0", "model.engine=vllm")
    assert code == 2
    assert "merge it into its model with `rllm export RUN --model FOLDER`" in errors
