"""A real SGLang as the sampler: its capabilities, exact tokens, new weights, and a training with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.backends.sampler import ServerSampler
from rllm.errors import ConfigError, WeightSyncError
from rllm.inference.openai_engine import OpenAIEngine
from rllm.inference.servers.capabilities import probe
from rllm.inference.servers.control import DiskUpdate, VLLMControl, choose_handover
from rllm.inference.servers.vllm_server import VLLMServer
from rllm.trainer import AgentTrainer

from .conftest import SGLang

pytestmark = pytest.mark.sglang
ROUNDING = 1e-4


class Forgets(DiskUpdate):
    """Transfer that claims success, and does nothing, a number of times."""

    def __init__(self) -> None:
        self.times = 0

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        self.times -= 1
        if self.times < 0:
            super().send(control, folder, served_name)


def test_capabilities_of_the_server_are_detected(sglang: SGLang) -> None:
    found = probe(sglang.url)
    assert found.ok
    assert [finding.name for finding in found.findings if not finding.ok] == ["streamed ids"]
    answer = {finding.name: finding.detail for finding in found.findings}
    assert answer["kind of log-probabilities"].startswith("processed")
    assert answer["new weights"] == "by disk, while it runs"


async def test_tokens_equal_those_of_a_forward_pass(sglang: SGLang) -> None:
    engine = OpenAIEngine("policy", base_url=sglang.url)
    messages = [{"role": "user", "content": "the user asks"}]
    output = await engine.get_model_response(messages, max_tokens=12, temperature=0.7)
    await engine.close()
    assert output.prompt_ids == sglang.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids = torch.tensor([[*output.prompt_ids, *output.completion_ids]])
    with torch.no_grad():
        logits = sglang.model(ids).logits[0, len(output.prompt_ids) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(1, ids[0, len(output.prompt_ids) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=ROUNDING, rtol=0)


def test_weights_are_transferred_and_failed_transfers_are_detected(sglang: SGLang, tmp_path: Path) -> None:
    server = VLLMServer.join(sglang.url)
    model, handover = copy.deepcopy(sglang.model), Forgets()
    sampler = ServerSampler(
        server,
        handover,
        model,
        sglang.tokenizer,
        adapter=None,
        served_name="policy",
        scratch=tmp_path / "weights",
    )
    for version in range(3):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        handover.times = int(version == 1)  # two tries are needed then
        sampler.sync_weights(version)
        assert server.control.weight_version().endswith(f":{version}")
        assert sampler._published is not None
        assert sampler._published.logprobs.gap < ROUNDING
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    handover.times = 2
    with pytest.raises(WeightSyncError, match=r"version 3 did not reach the sampler .* two tries"):
        sampler.sync_weights(3)
    with pytest.raises(ConfigError, match=r"SGLang.*model\.lora_rank"):
        choose_handover(server.control, lora=True)
    sampler.close()


def test_training_uses_the_running_server(sglang: SGLang, tmp_path: Path) -> None:
    """Two turns each, the second after the tokens of the first."""
    from openai import OpenAI

    def agent(question: str, base_url: str) -> float:
        client = OpenAI(base_url=base_url, api_key="none")
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(2):
            answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
        return float(len(answer) % 2)

    model = [f"model.path={sglang.folder}", "model.device=cpu", "model.engine=vllm", f"vllm.url={sglang.url}"]
    sizes = ["num_steps=2", "tasks_per_step=2", "rollout.group_size=4", "rollout.max_tokens=8", "optim.lr=1e-3"]
    AgentTrainer(
        agent_run_func=agent,
        train_dataset=[{"question": "the user"}, {"question": "the assistant"}],
        config=[*model, *sizes, f"run_dir={tmp_path / 'run'}", "trackers=[jsonl]"],
    ).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/loss" in line]
    assert [step["policy/weight_version"] for step in steps] == [1, 2]
    assert max(step["policy/sampler_gap_max"] for step in steps if "policy/loss" in step) < ROUNDING
    assert sum(value for step in steps for name, value in step.items() if name.startswith("tokens/drift/")) == 0
