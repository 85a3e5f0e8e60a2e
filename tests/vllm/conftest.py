"""A real vLLM on the CPU, over a small random model. `make test-vllm` installs it.

One server runs at a time: a start takes half a minute, and a server two gigabytes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllm.backends.lora import Adapter
from rllm.backends.sampler import ServerSampler
from rllm.inference.servers.command import ServeOptions
from rllm.inference.servers.control import Handover, choose_handover
from rllm.inference.servers.vllm_server import VLLMServer, free_port

START_S = 900.0
ARGUMENTS = ("--enforce-eager",)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # fewer processes to start
}


@dataclass(frozen=True)
class VLLM:
    """The server, and the model that it serves."""

    server: VLLMServer
    folder: Path
    model: Any
    tokenizer: Any

    @property
    def url(self) -> str:
        """URL, up to and including `/v1`."""
        return self.server.url

    @contextmanager
    def sampler(
        self,
        model: Any,
        scratch: Path,
        *,
        adapter: Adapter | None = None,
        handover: Handover | None = None,
    ) -> Iterator[ServerSampler]:
        """Return a sampler of this model on the server, which keeps running."""
        server = VLLMServer.join(self.url)
        sampler = ServerSampler(
            server,
            handover or choose_handover(server.control, lora=adapter is not None),
            model,
            self.tokenizer,
            adapter=adapter,
            served_name="policy",
            scratch=scratch,
        )
        try:
            yield sampler
        finally:
            sampler.close()


@pytest.fixture(scope="session")
def vllm_command() -> str:
    """The program of the environment that `make test-vllm` installs."""
    command = Path(os.environ.get("RLLM_TEST_VLLM", ".vllm")).absolute() / "bin" / "vllm"
    assert command.exists(), f"{command} is not there: run `make test-vllm`"
    return str(command)


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


class Servers:
    """Servers, one at a time: each start stops the previous one."""

    def __init__(self, command: str, folder: Path) -> None:
        from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

        self._command = command
        self.folder = folder
        self._current = ExitStack()
        self._running: tuple[int, VLLM] | None = None
        self.tokenizer = train_tokenizer(
            ["the user asks the assistant, and the assistant answers\n"] * 50, vocab_size=600
        )
        # Heads of 32: the smallest for vLLM's attention on CPUs.
        sizes: dict[str, Any] = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "intermediate_size": 256}
        self.new_model: Callable[[int], Any] = lambda seed: new_model(
            self.tokenizer, TinyPolicyRecipe(seed=seed, **sizes)
        ).eval()
        self.model = self.new_model(0)
        self.model.save_pretrained(folder / "model")
        self.tokenizer.save_pretrained(folder / "model")

    def serve(self, *, lora_rank: int = 0) -> VLLM:
        """Start a server of the model, with its first weights."""
        if self._running is None or self._running[0] != lora_rank:
            self.close()
            options = ServeOptions(
                model=str(self.folder / "model"),
                port=free_port(),
                dtype="float32",
                lora_rank=lora_rank,
                on_cpu=True,
                extra_args=ARGUMENTS,
            )
            server = VLLMServer.start(
                options, command=[self._command], log=self.folder / "vllm.log", start_timeout_s=START_S
            )
            self._current.callback(server.close)
            vllm = VLLM(server=server, folder=self.folder / "model", model=self.model, tokenizer=self.tokenizer)
            self._running = (lora_rank, vllm)
        running = self._running[1]
        if not lora_rank:
            with running.sampler(copy.deepcopy(self.model), self.folder / "first") as sampler:
                sampler.sync_weights(0)
        return running

    def close(self) -> None:
        """Stop the running server."""
        self._running = None
        self._current.close()


@pytest.fixture(scope="session")
def servers(vllm_command: str, environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(vllm_command, tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def vllm(servers: Servers) -> VLLM:
    return servers.serve()
