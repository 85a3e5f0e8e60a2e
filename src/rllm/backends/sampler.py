"""Sampler of a policy in training: the protocol, the one in this process, and the one that is a vLLM server."""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError

from rllm._runtime.ids import new_id
from rllm.backends.lora import Adapter
from rllm.backends.weight_sync_check import Probe, ProbeLogprobs, check_moved
from rllm.errors import InferenceError, WeightSyncError
from rllm.gateway.upstream.policy_server import ServedEngine
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import LoadedModel, save_model, warn_of_ends
from rllm.inference.servers.control import Handover
from rllm.inference.servers.vllm_server import VLLMServer
from rllm.parser.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Sampler(Protocol):
    """Sampler of the policy. All methods block."""

    @property
    def inference(self) -> InferenceEngine:
        """Engine that samples from the weights of the last sync."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of these weights."""
        ...

    def paused(self, *, until_sync: bool = False) -> AbstractContextManager[object]:
        """Let the trainer change its weights inside the block, and use all memory of a shared device.

        With `until_sync`, weights are synced before the block ends, so what depends on the old ones may be freed.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes that it takes in this process, by part."""
        ...

    def sync_weights(self, version: int) -> None:
        """Sample from the trainer's current weights from now on; raise `WeightSyncError` if they did not arrive."""
        ...

    def close(self) -> None:
        """Stop sampling. Repeatable."""
        ...


class EmbeddedSampler:
    """Sampler in this process.

    It shares the trainer's tensors, so it is paused while they change; with `overlap` it has a copy of the trained
    ones and keeps sampling.
    """

    def __init__(self, loaded: LoadedModel, *, overlap: bool = False, **options: Any) -> None:
        """Make the engine; `options` are passed to `LocalEngine`."""
        self._trained = loaded.model
        self._sampled = loaded.model
        if overlap:  # its own copy of the trained weights, while it shares the frozen ones
            frozen = {id(weight): weight for weight in loaded.model.parameters() if not weight.requires_grad}
            self._sampled = copy.deepcopy(loaded.model, memo=frozen).requires_grad_(False)
        self.inference = LocalEngine(self._sampled, loaded.tokenizer, device=loaded.device, **options)

    @property
    def weight_version(self) -> int:
        return self.inference.weight_version

    @contextmanager
    def paused(self, *, until_sync: bool = False) -> Iterator[None]:
        if self._sampled is not self._trained:
            yield
            return
        with self.inference.paused():
            if until_sync:
                self.inference.drop_states()
            yield

    def memory(self) -> dict[str, int]:
        parts = self.inference.memory()
        if self._sampled is not self._trained:
            copied = sum(weight.nbytes for weight in self._trained.parameters() if weight.requires_grad)
            parts["sampler_weights"] += copied
        return parts

    def sync_weights(self, version: int) -> None:
        with self.inference.paused():
            if self._sampled is not self._trained:
                pairs = zip(self._trained.parameters(), self._sampled.parameters(), strict=True)
                with torch.no_grad():
                    for weight, copied in pairs:
                        if weight.requires_grad:
                            copied.copy_(weight)
            self.inference.publish(version)

    def close(self) -> None:
        self.inference.close()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Weights that the server has, kept to send them again if it restarts."""

    version: int
    folder: Path
    logprobs: ProbeLogprobs


def engine_on(
    server: VLLMServer, tokenizer: PreTrainedTokenizerBase, served_name: str, tool_format: str | None = None
) -> ServedEngine:
    """Return the engine of the model that a server serves under this name.

    While the server restarts, calls wait; they fail if the restart does. `tool_format` is passed to `TokenPrompts`.
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


class ServerSampler:
    """vLLM server as the sampler of a trainer in this process.

    The weights go through files in `scratch`, which the server reads. Answers in progress are frozen meanwhile and
    continue under the new weights, their cached states computed again.
    """

    def __init__(
        self,
        server: VLLMServer,
        handover: Handover,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        adapter: Adapter | None,
        served_name: str,
        tool_format: str | None = None,
        scratch: Path,
        sleeps: bool = False,
        max_length: int | None = None,
        largest_gap: float | None = None,
    ) -> None:
        """Open the server's engine; it sleeps at once if it shares the trainer's GPU.

        Args:
            server: a server that is ready.
            handover: transfers the weights to it.
            model: the trainer's model.
            tokenizer: the trainer's tokenizer.
            adapter: the trainer's adapter; if there is one, only its weights are sent.
            served_name: name of the model in calls.
            tool_format: format of tool calls that the server parses; `None` takes the chat template's.
            scratch: folder that the server sees, too; removed by `close`.
            sleeps: let the server sleep while the trainer works, since they share a GPU.
            max_length: bound on the tokens of a prompt with its answer.
            largest_gap: see `Probe`.
        """
        warn_of_ends(model, tokenizer, ChatTemplate(tokenizer), on_server=True)
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

    def memory(self) -> dict[str, int]:
        return {}

    def paused(self, *, until_sync: bool = False) -> AbstractContextManager[object]:
        """Put a server that shares the trainer's GPU to sleep until the next sync; others have their own weights."""
        if self._sleeps and not self._asleep:
            try:
                self._put_to_sleep()
            except InferenceError:  # it has just died, and is being restarted
                self.server.await_ready()
                self._put_to_sleep()
        return nullcontext()

    def _put_to_sleep(self) -> None:
        with self.server.changing:
            self.server.control.sleep()
            self._asleep = True

    def sync_weights(self, version: int) -> None:
        """Send the server the current weights and check that they arrived; tried twice.

        Raises:
            WeightSyncError: if both tries fail, or if there is no room for the weights.
        """
        folder = self._write(version)
        before = self._published
        for is_last_try in (False, True):
            try:
                if is_last_try:
                    self.server.await_ready()
                with self.server.changing:
                    self._published = self._send_and_check(folder, version)
                break
            except (InferenceError, WeightSyncError) as error:
                if is_last_try:
                    with suppress(InferenceError):
                        self.server.control.resume()
                    raise WeightSyncError(
                        f"weights of version {version} did not reach the sampler at {self.server.url} in two tries: "
                        f"{error}"
                    ) from error
                logger.warning("sending the weights of version %d again: %s", version, error)
        if before is None:
            self.server.watch(self.restore)
        else:
            shutil.rmtree(before.folder, ignore_errors=True)

    def restore(self) -> None:
        """Send a restarted server the weights that it had; raise `WeightSyncError` unless they arrive."""
        assert self._published is not None, "a watched server has weights"
        was_asleep = self._asleep
        self._send(self._published.folder, self._published.version)
        self.probe.check_again(self._published.logprobs.trainer, self.server.control, self._served_name)
        if was_asleep:
            self._put_to_sleep()

    def close(self) -> None:
        self.inference.close()
        self.server.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _send_and_check(self, folder: Path, version: int) -> Published:
        self._send(folder, version)
        logprobs = self.probe.check(self.server.control, self._served_name)
        if self._handover.shows_bits:
            self.probe.check_bits(self.server.control)
        if self._published is not None:
            check_moved(self._published.logprobs, logprobs)
        logger.info(
            "weights of version %d are served (%s), and differ from the trainer's by %.1g",
            version,
            self._handover.name,
            logprobs.gap,
        )
        return Published(version=version, folder=folder, logprobs=logprobs)

    def _send(self, folder: Path, version: int) -> None:
        control = self.server.control
        if self._asleep:
            control.wake_up()
            self._asleep = False
        marker = f"{self._run_id}:{version}"
        control.pause()  # after an error it stays so, since its weights may be mixed
        self._handover.send(control, folder, self._served_name)
        control.reset_prefix_cache()
        control.set_weight_version(marker)
        self.server.expect(marker)
        self.inference.publish(version)
        control.resume()

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
                f"weights of version {version} cannot be written to {str(self._scratch)!r}, where the sampler reads "
                f"them ({error}): make room for two sets of them there, or choose another folder with vllm.sync_dir"
            ) from error
        return folder
