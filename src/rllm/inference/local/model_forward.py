"""Running `transformers` models: attention without copied keys, argument names, checks, and faster decode steps."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rllm.errors import ConfigError, first_line
from rllm.inference.local.packed import RowwiseActivation
from rllm.types import JSONObject

logger = logging.getLogger(__name__)

NAME = "rllm_sdpa"


class TreeAttention(Protocol):
    """Attention of sequences that share tokens, computed in place of the model's own."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [B, H, T, D]
        keys: torch.Tensor,  # [B, K, T, D]
        values: torch.Tensor,  # [B, K, T, D]
        mask: torch.Tensor | None,  # [B, 1, T, T]; None: each token attends to those before it
        scale: float,
    ) -> torch.Tensor:
        """Return [B, H, T, D] the attention's output."""
        ...


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model with `sdpa` attention and grouped queries run without repeating its keys and values.

    Without a mask, and where no kernel applies, `transformers`' own function is used.
    """
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def grouped_attention(
    module: Any,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, K, L, D], K <= H
    value: torch.Tensor,  # [B, K, L, D]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    above: TreeAttention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implement `transformers`' sdpa interface. In decoding (T = 1), a group's queries become a sequence T = H / K.

    A model passes on arguments that it does not know, so `above` arrives from its caller. On a CPU, attention stays in
    float32 under autocast: the gradients of bfloat16 take twice as long.
    """
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            states = (query.float(), key.float(), value.float())
            return grouped_attention(module, *states, attention_mask, dropout, scaling, above, **options)
    batch, heads, length, size = query.shape
    is_biased = options.get("position_bias") is not None  # which only transformers' own function adds to the scores
    if above is not None:
        if is_biased:
            raise ValueError("attention with a bias for positions takes no shared prefix")
        scale = size**-0.5 if scaling is None else scaling
        out = above.attend(module.layer_idx, query, key, value, attention_mask, scale)
        return out.transpose(1, 2).contiguous(), None
    groups = key.shape[1]
    if attention_mask is not None and groups != heads and not dropout and not is_biased:
        attend = torch.nn.functional.scaled_dot_product_attention
        if length == 1 and not torch.is_grad_enabled():
            grouped = query.view(batch, groups, heads // groups, size)
            out = attend(grouped, key, value, attn_mask=attention_mask, scale=scaling)
            return out.reshape(batch, 1, heads, -1), None
        if query.device.type == "cpu":  # its kernel reads grouped keys in place
            out = attend(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def has_full_attention(model: PreTrainedModel) -> bool:
    """Return whether every layer keeps all keys and values, and uses them alike at all positions.

    The former is read from `transformers`' own cache; the latter excludes Llama 4, whose temperature depends on the
    length.
    """
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
        return False
    if getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False):
        return False
    try:
        layers = DynamicCache(config=model.config).layers
    except AttributeError:  # the configuration does not name its layers
        return False
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def plain_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return the logits after `ids`, [1, vocabulary], from a forward pass with neither cache nor padding."""
    inputs = torch.tensor([ids], device=model.device)
    logits: torch.Tensor = model(input_ids=inputs, use_cache=False, **last_logits_only(model)).logits
    return logits[:, -1]


_CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")
"""Names in `transformers` before 5.24, since 5.24, and in state-space models before 5.24."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument of the forward pass that takes a cache."""
    known = inspect.signature(type(model).forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in known), _CACHE_ARGUMENTS[0])


def last_logits_only(model: PreTrainedModel) -> JSONObject:
    """Return the argument that limits logits to the last position, for models that have it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def check_causal(model: PreTrainedModel) -> None:
    """Check that later tokens do not change a token's logits, as in a causal language model.

    Raises:
        ConfigError: if they do, so that sampling token by token would differ from a pass over the whole sequence;
            or if the model does not run on tokens alone.
    """
    chunk = _chunk_size(model)
    length = chunk + 5
    end = max(2, chunk - 5)  # to the end of the second chunk, which shows errors in what the first passes on
    try:
        size = model.get_input_embeddings().num_embeddings
        ids = torch.tensor([[(7 * token + 3) % size for token in range(length + end)]], device=model.device)
        with torch.no_grad():
            longer, alone = (
                model(input_ids=part, use_cache=False).logits[0, :length].float() for part in (ids, ids[:, :length])
            )
    except Exception as error:  # because inputs or packages are missing
        raise ConfigError(
            f"{type(model).__name__} does not run on tokens alone ({type(error).__name__}: {first_line(error)})"
        ) from error
    # Experts round differently if they receive other tokens as well.
    allowed = 1e-4 if model.dtype.itemsize >= 4 else 0.1
    if (longer - alone).norm() > allowed * alone.norm():
        raise ConfigError(
            f"{type(model).__name__} lets later tokens change a token's probabilities, so it can be neither sampled "
            "nor trained token by token: use a causal model (BERT's family is causal with is_decoder=true in "
            "config.json; state-space layers without the package mamba-ssm, which needs CUDA, are not always causal)"
        )


def _chunk_size(model: PreTrainedModel) -> int:
    """Return the chunk of state-space layers or of Reformer's hashes, in tokens; 0 where there is none."""
    config = model.config.get_text_config(decoder=True)
    if hashed := getattr(config, "lsh_attn_chunk_length", None):
        return int(2 * hashed)
    found = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
    return next((size for size in found if isinstance(size, int)), 0)


# --- prompts that rows share ------------------------------------------------------------------------------------------

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_sigmoid = RowwiseActivation(torch.sigmoid)


class PromptAttention:
    """Attention of B rows to their prompts and to what follows; a `TreeAttention` of one decode step.

    Keys and values of a long prompt are kept once for all rows that begin with it. Samples of one prompt would
    otherwise each read a copy of it from main memory; now all but the first read it from the CPU's cache. A row attends
    to its prompt and to what follows separately, and the two results are joined by their log-sum-exp (Juravsky et al.
    2024, Hydragen). A row alone does the same, and rows' queries are not multiplied together, so a row's result does
    not depend on which others share its prompt.

    Shapes: B rows, n of them with a prompt, K key heads, Q queries of each key head and row, D head size, P tokens of a
    prompt, W columns that hold what follows prompts.
    """

    def __init__(self, prompts: Sequence[Tensor | None]) -> None:
        """Put the rows in order of their prompts.

        Args:
            prompts: prompt of each row, [layer, key or value, K, P, D]; `None` where a row's slot holds all of it.
        """
        found = {id(prompt): prompt for prompt in prompts if prompt is not None}
        rows = {key: [row for row, prompt in enumerate(prompts) if prompt is found[key]] for key in found}
        order = [row for members in rows.values() for row in members]
        self._prompts = list(found.values())
        self._sizes = [len(members) for members in rows.values()]
        self._order = torch.tensor(order)  # [n]
        self._place = torch.zeros(len(prompts), dtype=torch.long)  # [B] of each row in this order
        self._place[self._order] = torch.arange(len(order))
        self._has_none = torch.tensor([prompt is None for prompt in prompts]).view(-1, 1, 1)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [B, K * Q, 1, D]
        keys: Tensor,  # [B, K, W, D]
        values: Tensor,  # [B, K, W, D]
        mask: Tensor | None,  # [B, 1, 1, W]
        scale: float,
    ) -> Tensor:
        """Return [B, K * Q, 1, D] the attention's output."""
        grouped = query.view(*keys.shape[:2], -1, query.shape[-1])  # [B, K, Q, D]
        own, own_total = _attend(grouped, keys, values, attn_mask=mask, scale=scale)
        parts = [
            _attend(part, *prompt[layer].unsqueeze(1).expand(-1, len(part), -1, -1, -1), scale=scale)
            for part, prompt in zip(grouped.index_select(0, self._order).split(self._sizes), self._prompts, strict=True)
        ]
        of_prompt, total = (torch.cat(pieces).index_select(0, self._place) for pieces in zip(*parts, strict=True))
        fraction = _sigmoid((total - own_total).masked_fill_(self._has_none, -torch.inf))  # [B, K, Q]
        # Not `lerp`, which rounds differently at the end of a vector.
        joined: Tensor = own + (of_prompt - own) * fraction.unsqueeze(-1)
        return joined.to(query.dtype).reshape(query.shape)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


class DecodeGraphs:
    """Forward passes of one device, recorded as CUDA graphs by shape.

    A step of a small model starts more than a thousand kernels, which takes a GPU's host several times as long as the
    GPU takes to run them. A graph starts all of them at once.

    The first pass of a shape runs as usual, which chooses and loads its kernels. The second one is recorded, and later
    ones replay it. So a pass may only read tensors that stay where they are, and `clear` must be called when they move.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._can_record = device.type == "cuda"

    def run(self, shape: Hashable, forward: Callable[[], Tensor]) -> Tensor:
        """Return what `forward` returns; the next pass may overwrite it."""
        if not self._can_record:
            return forward()
        if shape not in self._seen:
            self._seen.add(shape)
            return forward()
        if shape not in self._recorded:
            try:
                self._recorded[shape] = self._record(forward)
            except Exception as error:  # the model reads values back from the device, for example to choose its experts
                logger.info(
                    "decode steps cannot be recorded as a CUDA graph, so they take longer: %s", first_line(error)
                )
                self._can_record = False
                return forward()
        graph, output = self._recorded[shape]
        graph.replay()
        return output

    def _record(self, forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        pool = next((graph.pool() for graph, _ in self._recorded.values()), None)
        random_state = torch.cuda.get_rng_state(self._device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # Other threads, such as the one that trains, may use the device meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                finally:
                    graph.capture_end()
        except Exception:
            # A recording that fails leaves the generator unusable.
            generator = torch.Generator(self._device)
            generator.set_state(random_state)
            torch.cuda.default_generators[current.device_index].graphsafe_set_state(generator)
            raise
        current.wait_stream(stream)
        return graph, output

    def clear(self) -> None:
        """Forget all graphs."""
        self._seen.clear()
        self._recorded.clear()
