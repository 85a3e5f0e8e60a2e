"""Lets a vLLM server take its weights from a safetensors file while it runs.

This is the only file of rllm that vLLM's own processes import: their environment has vLLM and torch but not rllm. A
server with this folder on its PYTHONPATH loads it by `--worker-extension-cls rllm_vllm.Extension`, which registers the
weight transfer of `--weight-transfer-config '{"backend": "rllm_file"}'`.
"""

# mypy: disable-error-code="import-not-found, import-untyped, misc, type-arg, no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "rllm_file"


@dataclass
class NoInit(WeightTransferInitInfo):
    """A file needs no connection."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Location of the new weights."""

    path: str


class FileTransfer(WeightTransferEngine):
    """Weights in checkpoint format, read tensor by tensor from a file that the trainer wrote."""

    init_info_cls = NoInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: a file needs no connection."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The inherited method waits for an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


class Extension:
    """Methods that `/collective_rpc` calls on every worker."""

    def rllm_backend(self) -> dict[str, Any]:
        """Return the name of the weight transfer."""
        config = self.vllm_config.weight_transfer_config  # type: ignore[attr-defined]
        return {"backend": None if config is None else config.backend}

    def rllm_bits(self) -> dict[str, Any]:
        """Return each weight's shape, type, and the sum of its bits as integers."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {
            name: [list(weight.shape), str(weight.dtype), _bits(weight)] for name, weight in model.named_parameters()
        }


def _bits(weight: torch.Tensor) -> int:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().contiguous().view(integers).sum(dtype=torch.int64))


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _repack_tied_head(model: Any) -> None:
    """Refresh the packed copy of the embedding that a tied output head keeps on CPUs; a reload does not."""
    model = getattr(model, "language_model", model)  # of a model with images
    if not current_platform.is_cpu() or not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    head = _inner(getattr(model, "lm_head", None))
    embedding = _inner(getattr(getattr(model, "model", None), "embed_tokens", None))
    if head is not None and embedding is not None and getattr(head, "quant_method", None) is not None:
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def _inner(layer: Any) -> Any:
    """Return the layer that LoRA has wrapped, or the layer itself."""
    return getattr(layer, "base_layer", layer)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
