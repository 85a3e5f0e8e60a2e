"""Weight transfer to a running real vLLM; each way in which it may fail is detected."""

from __future__ import annotations

import asyncio
import copy
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.backends.local.backend import LocalBackend
from rllm.backends.lora import Adapter, LoraSettings
from rllm.backends.sampler import ServerSampler
from rllm.errors import WeightSyncError
from rllm.gateway.upstream.base import Route, UpstreamCall
from rllm.inference.servers.control import FileTransfer, LoraLoad, Reload, VLLMControl
from rllm.trainer.config import load_config

from .conftest import START_S, VLLM, Servers

pytestmark = pytest.mark.vllm
ROUNDING = 1e-4


def changed(model: Any, *, by: float = 0.02, seed: int = 0) -> Any:
    """Change the model like an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(by * torch.randn(weight.shape, generator=generator))
    return model


def logprobs_of(model: Any, ids: list[int], num_sampled: int) -> Tensor:
    """Return the log-probabilities of a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -num_sampled - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[-num_sampled:])[:, None])[:, 0]


class Forgets:
    """Transfer that claims success, and does nothing, a number of times."""

    name = "forgets"

    def __init__(self, real: FileTransfer | LoraLoad, times: int) -> None:
        self.real = real
        self.times = times
        self.shows_bits = real.shows_bits

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        if self.times:
            self.times -= 1
        else:
            self.real.send(control, folder, served_name)


def test_weights_are_transferred_to_a_running_server(vllm: VLLM, tmp_path: Path) -> None:
    model = copy.deepcopy(vllm.model)
    with vllm.sampler(model, tmp_path / "weights") as sampler:
        sampler.sync_weights(0)
        for version in (1, 2, 3):
            changed(model, seed=version)
            sampler.sync_weights(version)
            assert sampler.weight_version == version
            assert vllm.server.control.weight_version().endswith(f":{version}")
            assert sampler._published is not None
            assert sampler._published.logprobs.gap < ROUNDING


def test_answer_in_progress_continues_under_the_new_weights(vllm: VLLM, tmp_path: Path) -> None:
    before, model = copy.deepcopy(vllm.model), copy.deepcopy(vllm.model)
    with vllm.sampler(model, tmp_path / "weights") as sampler:
        sampler.sync_weights(0)
        ids, found, route = asyncio.run(answer_with_an_update(sampler, model))
    assert (route.weight_version, route.updated_to) == (0, 1)
    old, new = (logprobs_of(each, ids, len(found)) for each in (before, model))
    of_old = (torch.tensor(found) - old).abs() < ROUNDING
    num_old = int(of_old.cumprod(0).sum())
    assert 0 < num_old < len(found) - 1
    torch.testing.assert_close(torch.tensor(found)[num_old:], new[num_old:], atol=ROUNDING, rtol=0)


async def answer_with_an_update(sampler: ServerSampler, model: Any) -> tuple[list[int], list[float], Route]:
    """Return ids, log-probabilities and route of an answer; the weights change after some tokens."""
    upstream = sampler.inference.new_upstream()
    asked = {"messages": [{"role": "user", "content": "and?"}], "max_tokens": 800, "ignore_eos": True, "stream": True}
    call = UpstreamCall(id="call", request=upstream.prepare(asked), route=Route())
    prompt: list[int] = []
    answer: list[int] = []
    found: list[float] = []
    update = None
    async with aclosing(upstream.stream(call)) as batches:
        async for batch in batches:
            for chunk in batch:
                prompt = prompt or chunk.get("prompt_token_ids") or []
                for choice in chunk["choices"]:
                    answer += choice.get("token_ids") or []
                    found += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
            if len(answer) > 5 and update is None:
                update = asyncio.create_task(asyncio.to_thread(lambda: (changed(model), sampler.sync_weights(1))))
    assert update is not None
    await update
    await upstream.close()
    return [*prompt, *answer], found, call.route


def test_server_reports_checksums_of_its_weights(vllm: VLLM, tmp_path: Path) -> None:
    model = changed(copy.deepcopy(vllm.model))
    with vllm.sampler(model, tmp_path / "weights") as sampler:
        sampler.sync_weights(1)
        assert sampler.probe.check_bits(sampler.server.control) >= 2 * 2 + 1, (
            "at least the norms of two layers, and the last"
        )
        with torch.no_grad():
            model.model.norm.weight[0] += 1e-6
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight is not the trainer's, bit for bit"):
            sampler.probe.check_bits(sampler.server.control)


def test_transfer_without_effect_is_detected(vllm: VLLM, tmp_path: Path) -> None:
    model = copy.deepcopy(vllm.model)
    handover = Forgets(FileTransfer(), times=0)
    with vllm.sampler(model, tmp_path / "weights", handover=handover) as sampler:
        sampler.sync_weights(0)
        changed(model)
        handover.times = 1
        sampler.sync_weights(1)  # needs two tries
        assert handover.times == 0
        changed(model, seed=1)
        handover.times = 2
        with pytest.raises(WeightSyncError, match=r"version 2 did not reach the sampler .* two tries: the weights did"):
            sampler.sync_weights(2)


def test_small_update_is_verified_by_checksums_and_direction(vllm: VLLM, tmp_path: Path) -> None:
    model = copy.deepcopy(vllm.model)
    handover = Forgets(FileTransfer(), times=0)
    with vllm.sampler(model, tmp_path / "weights", handover=handover) as sampler:
        sampler.sync_weights(0)
        changed(model, by=1e-5)  # changes log-probabilities by some 1e-5, where 1e-3 counts as rounding
        handover.times = 2
        with pytest.raises(WeightSyncError, match="is not the trainer's, bit for bit"):
            sampler.sync_weights(1)
        handover.shows_bits, handover.times = False, 2
        with pytest.raises(WeightSyncError, match="moved the trainer's log-probabilities of a probe by"):
            sampler.sync_weights(1)


def test_reload_that_skips_a_tied_head_is_detected(vllm: VLLM, tmp_path: Path) -> None:
    """On CPUs vLLM keeps a packed copy of the head, which its own reload does not renew."""
    model = changed(copy.deepcopy(vllm.model))
    with (
        vllm.sampler(model, tmp_path / "weights", handover=Reload()) as sampler,
        pytest.raises(WeightSyncError, match="differ from the trainer's by"),
    ):
        sampler.sync_weights(1)
    with vllm.sampler(model, tmp_path / "weights") as sampler:
        assert isinstance(sampler._handover, FileTransfer)
        sampler.sync_weights(1)


def test_adapters_are_transferred_and_failed_transfers_are_detected(servers: Servers, tmp_path: Path) -> None:
    vllm = servers.serve(lora_rank=4)
    model = copy.deepcopy(vllm.model)
    adapter = Adapter(model, LoraSettings(rank=4, alpha=8.0))
    handover = Forgets(LoraLoad(), times=0)
    with vllm.sampler(model, tmp_path / "weights", adapter=adapter, handover=handover) as sampler:
        sampler.sync_weights(0)
        for version in (1, 2):
            changed(model, seed=version)
            sampler.sync_weights(version)
            assert sampler._published is not None
            assert sampler._published.logprobs.gap < ROUNDING
        changed(model, seed=3)
        handover.times = 2
        with pytest.raises(WeightSyncError, match="version 3 did not reach the sampler"):
            sampler.sync_weights(3)


def test_adapter_on_another_base_is_detected(servers: Servers, tmp_path: Path) -> None:
    vllm = servers.serve(lora_rank=4)
    model = servers.new_model(1)
    adapter = Adapter(model, LoraSettings(rank=4, alpha=8.0))
    with (
        vllm.sampler(model, tmp_path / "weights", adapter=adapter) as sampler,
        pytest.raises(WeightSyncError, match="version 0 did not reach the sampler"),
    ):
        sampler.sync_weights(0)


def test_quantized_policy_is_sampled_with_its_dequantized_weights(
    servers: Servers, vllm_command: str, tmp_path: Path
) -> None:
    """The server starts with the dequantized weights, and gets the adapter alone."""
    servers.close()
    settings = [
        *(f"model.path={servers.folder / 'model'}", "model.device=cpu", "model.lora_rank=4", "model.quantize=int8"),
        *("model.engine=vllm", f"vllm.command={vllm_command}", f"vllm.start_timeout_s={START_S}"),
        *("vllm.args=[--enforce-eager]", f"run_dir={tmp_path}"),
    ]
    backend = LocalBackend.from_config(load_config(settings))
    try:
        with torch.no_grad():
            for name, weight in backend.model.named_parameters():
                if ".lora_B." in name:
                    weight.normal_(std=0.1)
        assert backend.publish() == 1
        asked = [{"role": "user", "content": "the assistant"}]
        answer = asyncio.run(backend.inference.get_model_response(asked, max_tokens=8, temperature=1.0))
        ids = [*answer.prompt_ids, *answer.completion_ids]
        span = StepSpan(step_id="a", start=len(answer.prompt_ids), stop=len(ids))
        scores = backend.score(Batch.of([TokenSequence(ids=ids, spans=[span], logprobs=answer.logprobs)]))
        torch.testing.assert_close(torch.tensor(answer.logprobs), scores, atol=1e-4, rtol=0)
    finally:
        backend.close()
