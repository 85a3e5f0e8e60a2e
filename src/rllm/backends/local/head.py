"""A model's head: hidden states to logits, with all that the model itself does to these.

Granite divides them, Cohere multiplies them, Gemma 2 bounds them: without that, the policy that is trained is not the one that
is sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from rllm.errors import ConfigError

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
"""What configurations call a factor; some models multiply by it and some divide, under the same name."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What they call a bound."""
_PROBE = (7, 3, 5, 2, 11)


def body_of(model: Any) -> Any:
    """A causal language model without its head, whose states are made into logits; the model itself where there is no such part."""
    body = model.base_model
    if body is not model:
        return body
    # Llama 4's prefix is that of the model with images, which the one of text is a part of.
    text = getattr(model, "language_model", model)
    return getattr(text, "model", model)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Callable as hidden states [n, hidden size] -> logits [n, V]."""

    linear: Any
    """The model's output embeddings, with the layers before them that are not of its body."""
    out_features: int
    """V."""
    factor: float = 1.0
    cap: float | None = None
    """Logits l become cap * tanh(l / cap)."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """The head that gives the model's own logits, found by trying what its configuration names.

        Raises:
            ConfigError: if none does, or if `transformers` offers no body without the head.
        """
        body = body_of(model)
        if body is model:
            raise ConfigError(
                f"{type(model).__name__} offers no body apart from its head, whose states are needed here: use backend=verl, whose "
                "workers run the model as a whole"
            )
        ids = torch.tensor(
            [[token % model.get_input_embeddings().num_embeddings for token in _PROBE]], device=model.device
        )
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
            states = body(input_ids=ids, use_cache=False).last_hidden_state
            tolerance = 1e-4 if expected.dtype.itemsize >= 4 else 2e-2  # in bfloat16, a rounding is 4e-3
            for head in cls._known(model):
                try:
                    error = (head(states) - expected).abs().max()
                except (RuntimeError, TypeError, AttributeError):  # layers that do not fit behind each other
                    continue
                if error <= tolerance * expected.abs().max():
                    return head
        raise ConfigError(
            f"{type(model).__name__} does something to its logits that is not known here, so it would be trained on other "
            "probabilities than it is sampled from: use backend=verl, whose workers run the model's own forward pass"
        )

    @classmethod
    def _known(cls, model: Any) -> Iterator[Self]:
        """What the configuration names comes first: logits near 0 look the same with a bound as without."""
        config, linear, body = model.config.get_text_config(decoder=True), model.get_output_embeddings(), body_of(model)
        # ModernBERT's decoder has a layer between, and BERT's family has it in one module with the output embeddings.
        layers = nn.Sequential(*(child for child in model.children() if child is not body))
        caps = [value for name in _CAPS if (value := getattr(config, name, None))]
        factors = [value for name in _FACTORS if (value := getattr(config, name, None))]
        for cap in (*caps, None):
            for factor in (*(power for value in factors for power in (value, 1 / value)), 1.0):
                yield cls(linear=linear, out_features=linear.out_features, factor=factor, cap=cap)
        yield cls(linear=layers, out_features=linear.out_features)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden)
        if self.factor == 1.0 and self.cap is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
