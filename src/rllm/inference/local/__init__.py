"""The embedded sampler: batched decoding with a key-value cache, in the process and on the weights of the trainer.

Read `engine` first: messages to an answer. `scheduler` admits requests between decode steps, and `decode_thread` is the
thread that it runs on. Around them:

* `decoders`: the fastest decoder that is exact for a model; `slot_decoder` is the one for plain full attention.
* `kv_cache`: keys and values of sequences and of shared prefixes. `sampling`: logits to tokens.
* `model_forward`, `packed`: running `transformers` models, and packed weights on a CPU.
* `loading`, `quantized`: models and adapters from folders or the hub, and frozen weights in fewer bits.
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
