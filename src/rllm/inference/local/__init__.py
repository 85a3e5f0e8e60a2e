"""The embedded sampler: batched decoding with a key-value cache, in the process and on the weights of the trainer.

`engine.py` is the front, `loading.py` loads models, `quantized.py` keeps frozen weights in fewer bits for both.
"""

from __future__ import annotations

from rllm.errors import MissingDependencyError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise MissingDependencyError.of(error.name, "train", "the embedded sampler") from error

from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import LoadedModel, load_model

__all__ = ["LoadedModel", "LocalEngine", "load_model"]
