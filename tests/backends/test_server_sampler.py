"""Transfer of weights to a server, and each of its failures."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.sampler import ServerSampler
from rllm.backends.server_launch import RunningServer
from rllm.backends.update import update_weights
from rllm.backends.weight_sync_check import ProbeLogprobs, check_moved
from rllm.errors import WeightSyncError
from rllm.gateway.upstream.token_prompts import chat_answer
from rllm.inference.local.loading import LoadedModel
from rllm.inference.servers.control import FileTransfer
from rllm.inference.servers.vllm_server import VLLMServer
from rllm.trainer.config import load_config

from .model_server import ModelServer

HANDOVER = """/pause /start_weight_update /update_weights /finish_weight_update /reset_prefix_cache /update_weight_version
    /resume /v1/completions /v1/completions /collective_rpc""".split()
PATIENCE_S = 60.0


@pytest.fixture
def server(make_model: Callable[..., Any]) -> Iterator[ModelServer]:
    server = ModelServer(make_model(num_layers=1))
    yield server
    server.close()


@pytest.fixture
def trained_with(make_backend: Callable[..., LocalBackend], tmp_path: Path) -> Callable[..., LocalBackend]:
    """`trained_with(server)`: a backend whose sampler is that server."""

    def make(server: ModelServer, model: Any = None, **options: Any) -> LocalBackend:
        def serve(loaded: Any, adapter: Any) -> ServerSampler:
            return ServerSampler(
                VLLMServer.join(server.url, watch_interval_s=0.05),
                FileTransfer(),
                loaded.model,
                loaded.tokenizer,
                adapter=adapter,
                served_name="policy",
                scratch=tmp_path / "weights",
                **options,
            )

        return make_backend(model, serve=serve, lr=0.01)

    return make


@pytest.mark.parametrize(
    ("settings", "names"),
    [(["model.tool_parser=mistral"], ["f"]), (["model.tool_parser=hermes"], []), ([], ["f"])],
)
def test_tool_format_comes_from_the_settings_or_the_template(
    server: ModelServer,
    tokenizer: Any,
    make_model: Callable[..., Any],
    tmp_path: Path,
    settings: list[str],
    names: list[str],
) -> None:
    tokenizer = deepcopy(tokenizer)
    as_mistral = tokenizer.chat_template.replace("<tool_call>\n", "[TOOL_CALLS][").replace("\n</tool_call>", "]")
    tokenizer.chat_template = as_mistral
    config = load_config(["model.path=m", "model.engine=vllm", "model.device=cpu", f"vllm.url={server.url}", *settings])
    joined = VLLMServer.join(server.url)
    served = RunningServer(config=config, server=joined, scratch=tmp_path, tool_format=config.model.tool_parser)
    sampler = served.sampler(LoadedModel(model=make_model(), tokenizer=tokenizer, device=torch.device("cpu")), None)
    ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{}", add_special_tokens=False)
    completion = {"choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
    (choice,) = chat_answer(completion, sampler.inference._tokens.chunks({"tools": [{}]}, [1]))["choices"]
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls", ())] == names
    sampler.close()


def improve(backend: LocalBackend, groups: Callable[..., Any]) -> None:
    update_weights(backend, groups(), GRPO())


def test_weights_are_sent_at_the_start_and_after_updates(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any], tmp_path: Path
) -> None:
    backend = trained_with(server)
    assert server.calls == ["/openapi.json", "/v1/models", *HANDOVER]
    for version in (1, 2):
        server.calls.clear()
        improve(backend, groups)
        assert backend.publish() == version
        assert server.calls == HANDOVER
        assert server.weight_version.endswith(f":{version}")
        weights, theirs = backend.model.state_dict(), server.model.state_dict()
        assert all(torch.equal(weight, theirs[name]) for name, weight in weights.items())
    assert [path.name.partition("-")[0] for path in (tmp_path / "weights").iterdir()] == ["2"]
    backend.close()
    assert not (tmp_path / "weights").exists()


def test_update_without_effect_is_sent_again(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any]
) -> None:
    backend = trained_with(server)
    improve(backend, groups)
    server.ignores = 1
    assert backend.publish() == 1


def test_update_that_still_has_no_effect_stops_the_run(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any]
) -> None:
    backend = trained_with(server)
    improve(backend, groups)
    server.ignores = 2
    with pytest.raises(WeightSyncError, match="version 1"):
        backend.publish()


def test_full_disk_error_names_the_folder_and_the_remedy(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any], tmp_path: Path
) -> None:
    backend = trained_with(server)
    improve(backend, groups)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(WeightSyncError, match=rf"{tmp_path}/weights.*vllm\.sync_dir"):
            backend.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_update_hidden_by_rounding_is_detected_by_bits(
    make_model: Callable[..., Any], trained_with: Callable[..., LocalBackend]
) -> None:
    model = make_model().bfloat16()
    server = ModelServer(model)
    backend = trained_with(server, model)
    with torch.no_grad():
        backend.model.model.norm.weight[0] *= 1.01  # one of thousands of numbers, by the smallest step of bfloat16
    server.ignores = 2
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        backend.publish()
    server.close()


def test_server_of_another_model_is_detected_at_start(
    make_model: Callable[..., Any], trained_with: Callable[..., LocalBackend]
) -> None:
    other = ModelServer(make_model(seed=1))
    other.ignores = 2
    with pytest.raises(WeightSyncError, match="version 0"):
        trained_with(other)
    other.close()


def test_cached_states_of_old_weights_are_detected(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any]
) -> None:
    backend = trained_with(server)
    improve(backend, groups)
    server.keeps_cache = True
    with pytest.raises(WeightSyncError, match="cached states"):
        backend.publish()


def test_restarted_server_gets_weights_before_calls(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any]
) -> None:
    backend = trained_with(server)
    improve(backend, groups)
    backend.publish()
    known = server.weight_version
    # The trainer continues; the restored weights are the published ones.
    published = {name: weight.clone() for name, weight in backend.model.state_dict().items()}
    improve(backend, groups)
    server.restart()
    deadline = time.monotonic() + PATIENCE_S
    while server.weight_version != known:
        assert time.monotonic() < deadline, "the restart was not noticed"
        time.sleep(0.02)
    sampler: Any = backend._sampler
    sampler.server.await_ready()
    theirs = server.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in published.items())
    assert sampler.server.num_restarts == 1


def test_server_on_the_gpu_of_the_trainer_sleeps_during_updates(
    server: ModelServer, trained_with: Callable[..., LocalBackend], groups: Callable[..., Any]
) -> None:
    backend = trained_with(server, sleeps=True)
    assert server.calls == [
        "/openapi.json",
        "/v1/models",
        "/wake_up",
        *HANDOVER,
    ]  # it slept while the trainer loaded its model
    server.calls.clear()
    backend.score(groups())
    improve(backend, groups)
    assert server.calls == ["/sleep"]
    backend.publish()
    assert server.calls == ["/sleep", "/wake_up", *HANDOVER]


def likelihoods(trainer: list[float], sampler: list[float]) -> ProbeLogprobs:
    return ProbeLogprobs(torch.tensor(trainer), torch.tensor(sampler))


def test_weight_change_is_distinguished_from_kernel_differences() -> None:
    before = likelihoods([-1.0, -2.0], [-1.1, -1.9])
    check_moved(before, likelihoods([-1.2, -2.0], [-1.1, -1.9]))  # changed by 0.14; kernels differ by 0.1
    check_moved(before, likelihoods([-3.0, -2.0], [-2.9, -2.1]))
    with pytest.raises(WeightSyncError, match=r"1\.4"):
        check_moved(before, likelihoods([-3.0, -2.0], [-1.1, -1.9]))
