"""Sampling from a vLLM server: after every update it is given the weights while it runs, and has to prove that it has them."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rllm._runtime.ids import new_id
from rllm.backends.adapter import Adapter
from rllm.backends.sampling.proof import Likelihoods, Probe, check_moved
from rllm.errors import InferenceError, WeightSyncError
from rllm.gateway.upstream.served import ServedEngine
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.local.loading import save_model
from rllm.inference.servers.control import Handover
from rllm.inference.servers.vllm_server import VLLMServer
from rllm.parser.chat_template import ChatTemplate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the server was given last, to be given again if it starts anew."""

    version: int
    folder: Path
    found: Likelihoods


def engine_on(server: VLLMServer, tokenizer: Any, served_name: str, tool_format: str | None = None) -> ServedEngine:
    """The model that a server serves under this name, and how it reads tool calls (see `TokenPrompts`).

    While the server is brought back calls wait, and end with its failure.
    """
    return ServedEngine(
        server.url,
        model=served_name,
        tokens=TokenPrompts(tokenizer, tool_format),
        facts={"logprobs_kind": "processed", "template_hash": ChatTemplate(tokenizer).hash},
        is_ready=lambda: server.is_ready,
        failure=lambda: server.failure,
        api_key=server.control.api_key,
        hold_timeout_s=server.start_timeout_s + 60.0,
    )


class ServedSampler:
    """A vLLM server as the sampler of a trainer in this process.

    The weights go through files in `scratch`, which the server reads. Answers that are being made meanwhile are frozen, and go
    on under the new weights, their cached states computed again.
    """

    def __init__(
        self,
        server: VLLMServer,
        handover: Handover,
        model: Any,
        tokenizer: Any,
        *,
        adapter: Adapter | None,
        served_name: str,
        tool_format: str | None = None,
        scratch: Path,
        sleeps: bool = False,
        max_length: int | None = None,
        largest_gap: float | None = None,
    ) -> None:
        """The server is closed with the sampler.

        Args:
            server: is ready.
            handover: how it takes weights.
            model: the trainer's.
            tokenizer: likewise.
            adapter: likewise; if there is one, it alone is handed over.
            served_name: what calls ask for.
            tool_format: how the server reads tool calls; else the chat template tells it.
            scratch: a folder that the server sees, too; emptied as the sampler is closed.
            sleeps: whether the server rests while the trainer works, as they share a GPU; it then rests now.
            max_length: of a prompt and its answer.
            largest_gap: see `Probe`.
        """
        self.server = server
        self.probe = Probe(model, tokenizer, max_length=max_length, largest_gap=largest_gap)
        self.inference = engine_on(server, tokenizer, served_name, tool_format)
        self._handover = handover
        self._model = model
        self._adapter = adapter
        self._served_name = served_name
        self._scratch = scratch
        self._sleeps = sleeps
        self._asleep = sleeps
        self._run_id = new_id()[:8]
        self._published: Published | None = None

    @property
    def weight_version(self) -> int:
        return self.inference.weight_version

    def still(self) -> AbstractContextManager[object]:
        """A server has weights of its own; where it shares the trainer's GPU it sleeps, until the next weights wake it."""
        if self._sleeps and not self._asleep:
            try:
                self._put_to_sleep()
            except InferenceError:  # it has just died, and is brought back
                self.server.await_ready()
                self._put_to_sleep()
        return nullcontext()

    def _put_to_sleep(self) -> None:
        with self.server.changing():
            self.server.control.sleep()
            self._asleep = True

    def hand_over(self, version: int) -> None:
        """Give the server the weights as they are, and have it prove that it has them; tried twice.

        Raises:
            WeightSyncError: if both fail, or if there is no room for them.
        """
        folder = self._write(version)
        before = self._published
        for is_last_try in (False, True):
            try:
                if is_last_try:
                    self.server.await_ready()
                with self.server.changing():
                    self._published = self._proven(folder, version)
                break
            except (InferenceError, WeightSyncError) as error:
                if is_last_try:
                    with suppress(InferenceError):
                        self.server.control.resume()
                    raise WeightSyncError(
                        f"weights of version {version} did not reach the sampler at {self.server.url}, which was tried "
                        f"twice: {error}"
                    ) from error
                logger.warning("weights of version %d are handed over once more: %s", version, error)
        if before is None:
            self.server.watch(self.give_back)
        else:
            shutil.rmtree(before.folder, ignore_errors=True)

    def give_back(self) -> None:
        """Give a server that has started anew the weights that it had, and have it prove that it has them.

        Raises:
            InferenceError, WeightSyncError: if it has not.
        """
        assert self._published is not None, "what is watched has weights"
        was_asleep = self._asleep
        self._send(self._published.folder, self._published.version)
        self.probe.check_again(self._published.found.trainer, self.server.control, self._served_name)
        if was_asleep:
            self._put_to_sleep()

    def close(self) -> None:
        self.inference.close()
        self.server.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _proven(self, folder: Path, version: int) -> Published:
        """Send the weights, and look at them from all sides."""
        self._send(folder, version)
        found = self.probe.check(self.server.control, self._served_name)
        if self._handover.shows_bits:
            self.probe.check_bits(self.server.control)
        if self._published is not None:
            check_moved(self._published.found, found)
        logger.info(
            "weights of version %d are served (%s), and differ from the trainer's by %.1g",
            version,
            self._handover.name,
            found.gap,
        )
        return Published(version=version, folder=folder, found=found)

    def _send(self, folder: Path, version: int) -> None:
        control = self.server.control
        if self._asleep:
            control.wake_up()
            self._asleep = False
        marker = f"{self._run_id}:{version}"
        with _paused(self.server):
            self._handover.send(control, folder, self._served_name)
            control.reset_prefix_cache()
            control.set_weight_version(marker)
            self.server.expect(marker)
            self.inference.publish(version)

    def _write(self, version: int) -> Path:
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._scratch))
            if self._adapter is not None:
                self._adapter.save(folder)
            else:
                save_model(self._model, folder, max_shard_size="1000TB")
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"weights of version {version} cannot be written to {str(self._scratch)!r}, through which the sampler takes them "
                f"({error}): make room for two sets of them there, or name another folder with vllm.sync_dir"
            ) from error
        return folder


@contextmanager
def _paused(server: VLLMServer) -> Iterator[None]:
    """Inside, the server makes no answers; nor afterwards, if its weights may be half of one version and half of another."""
    server.control.pause()
    yield
    server.control.resume()
