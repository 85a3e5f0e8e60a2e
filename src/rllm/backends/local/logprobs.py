"""Hidden states to log-probabilities of tokens, in memory that does not grow with tokens times vocabulary.

Tokens that follow the same tokens, such as the first tokens of all answers to a prompt, are drawn from one
distribution, which is computed once.

Shapes: N tokens, drawn from U distributions over a vocabulary of V; n tokens and u distributions of one chunk, m of one
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from rllm.backends.local.summed_gradients import can_sum, summed_linear
from rllm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_ELEMENTS = 2**25
"""Logits (rows times vocabulary) that exist at one time, as a bound on memory: 128 MiB in float32."""
BLOCK_ELEMENTS = 2**18
"""Logits in one operation on a CPU, 1 MiB in float32: the result is still in its cache for the next operation."""
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
"""Names of scale factors in configurations; some models multiply by the factor and some divide, under the same name."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of bounds on logits in configurations."""
_PROBE = (7, 3, 5, 2, 11)


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a causal language model without its head, or the model itself if it has no such part."""
    body = model.base_model
    if body is not model:
        return body
    # Llama 4's text model has the prefix of the model with images, which it is a part of.
    text = getattr(model, "language_model", model)
    return getattr(text, "model", model)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Head of a model: hidden states [n, hidden size] to logits [n, V], with all that the model itself does to these.

    Granite divides its logits, Cohere multiplies them, Gemma 2 bounds them: without that, the policy that is trained is
    not the one that is sampled from.
    """

    linear: nn.Module
    """The model's output embeddings, with the layers before them that are not part of its body."""
    out_features: int
    """V."""
    factor: float = 1.0
    cap: float | None = None
    """Logits l become cap * tanh(l / cap)."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the head that gives the model's own logits, found by trying; raise `ConfigError` if none does."""
        body = body_of(model)
        if body is model:
            raise ConfigError(
                f"{type(model).__name__} has no body separate from its head, whose hidden states are needed here: "
                "use backend=verl, whose workers run the model as a whole"
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
                except (RuntimeError, TypeError, AttributeError):  # layers that do not fit one after another
                    continue
                if error <= tolerance * expected.abs().max():
                    return head
        raise ConfigError(
            f"{type(model).__name__} changes its logits in an unknown way, so it would be trained on other "
            "probabilities than it is sampled from: use backend=verl, whose workers run the model's own forward pass"
        )

    @classmethod
    def _known(cls, model: PreTrainedModel) -> Iterator[Self]:
        """Yield candidates, those with a bound first: logits near 0 look the same with a bound as without."""
        config, linear, body = model.config.get_text_config(decoder=True), model.get_output_embeddings(), body_of(model)
        # ModernBERT's decoder has a layer between, and BERT's family has it in one module with the output embeddings.
        layers = nn.Sequential(*(child for child in model.children() if child is not body))
        caps = [value for name in _CAPS if (value := getattr(config, name, None))]
        factors = [value for name in _SCALES if (value := getattr(config, name, None))]
        for cap in (*caps, None):
            for factor in (*(power for value in factors for power in (value, 1 / value)), 1.0):
                yield cls(linear=linear, out_features=linear.out_features, factor=factor, cap=cap)
        yield cls(linear=layers, out_features=linear.out_features)

    def __call__(self, hidden: Tensor) -> Tensor:
        is_summed = torch.is_grad_enabled() and can_sum(self.linear)
        logits: Tensor = summed_linear(self.linear, hidden) if is_summed else self.linear(hidden)
        if self.factor == 1.0 and self.cap is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def logprobs_and_entropy(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    state_of: Tensor | None = None,
    temperature: float,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [N] of targets under softmax(head(hidden) / temperature), and entropies [N] in nats.

    At most `CHUNK_ELEMENTS` logits exist at a time; where there are more, they are computed again in the backward pass.

    Args:
        hidden: [U, hidden size] states.
        head: makes logits of states, see `Head`.
        targets: [N] token ids.
        state_of: [N] index of the state that each target is drawn from; `None` if there is one state for each target.
        temperature: divides the logits.
        entropy: compute the entropies; zeros otherwise.
        entropy_gradient: let the entropies carry a gradient.
    """

    def chunk(states: Tensor, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, spread = TokenLogprobs.apply(head(states), rows, wanted, temperature, entropy)
        return logprobs, spread if entropy and entropy_gradient else spread.detach()

    if state_of is None:
        state_of = torch.arange(len(targets), device=targets.device)
    rows, order = state_of.sort(stable=True)
    wanted = targets[order]
    num_rows = max(CHUNK_ELEMENTS // head.out_features, 1)
    if len(hidden) <= num_rows:
        logprobs, spread = chunk(hidden, rows, wanted)
    else:
        pieces = []
        for states, start, tokens in zip(hidden.split(num_rows), *_runs(rows, len(hidden), num_rows), strict=True):
            given = states, rows[tokens] - start, wanted[tokens]
            again = torch.is_grad_enabled()
            pieces.append(checkpoint(chunk, *given, use_reentrant=False) if again else chunk(*given))
        logprobs, spread = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return logprobs[order.argsort()], spread[state_of]


def energies(hidden: Tensor, head: Head, targets: Tensor, *, state_of: Tensor, temperature: float) -> Tensor:
    """Return [N] `1 - 2 p + sum of all p²` for targets of probability p; arguments as of `logprobs_and_entropy`.

    It is the squared norm of the gradient of log p by the logits, at temperature 1. Without gradient.
    """
    found = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
    num_rows = max(CHUNK_ELEMENTS // head.out_features, 1)
    for start in range(0, len(hidden), num_rows):
        probabilities = _scores(head(hidden[start : start + num_rows]), temperature).softmax(-1)
        (tokens,) = ((state_of >= start) & (state_of < start + num_rows)).nonzero(as_tuple=True)
        rows = state_of[tokens] - start
        own, all_squared = probabilities[rows, targets[tokens]], probabilities.square().sum(-1)
        found[tokens] = (1 - 2 * own + all_squared[rows]).float()
    return found


class TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Log-probabilities [n] of targets and entropies [u] of rows of logits.

    Arguments are the logits [u, V], the row [n] of each target, rising, the targets [n], the temperature, and whether
    the entropy is wanted.

    The arithmetic is in float32 at least, whatever the format of the logits. The probabilities p overwrite the logits,
    and the gradients overwrite p, so the backward pass runs only once. With H the entropy and x the logits over the
    temperature, d log p_t / dx_i = [i = t] - p_i, and dH / dx_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        kept = logits.detach().to(_precise(logits)) if ctx.needs_input_grad[0] else None
        logprobs = logits.new_empty(len(targets), dtype=_precise(logits))
        spread = logprobs.new_zeros(len(logits))
        for block, tokens in _blocks(logits, rows):
            scores = _scores(logits[block], temperature)
            probabilities = scores.softmax(-1)
            # The greatest probability is at least 1 / V, so its logarithm is exact where the target's would not be.
            log_total = scores.amax(-1) - probabilities.amax(-1).log()
            row = rows[tokens] - block.start
            logprobs[tokens] = scores[row, targets[tokens]] - log_total[row]
            if entropy:
                spread[block] = log_total - torch.linalg.vecdot(probabilities, scores)
            if kept is not None:
                kept[block] = probabilities
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, rows, targets, spread)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, spread

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        kept, rows, targets, spread = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        for block, tokens in _blocks(kept, rows):
            total, row = kept[block], rows[tokens] - block.start
            of_row = total.new_zeros(len(total))
            if of_logprobs is not None:
                of_row.index_add_(0, row, of_logprobs[tokens])
            if of_entropy is not None:
                own = torch.xlogy(total, total).mul_(of_entropy[block, None])
                of_row.addcmul_(of_entropy[block], spread[block])
            total.mul_(-of_row[:, None])
            if of_logprobs is not None:
                total.view(-1).index_add_(0, row * total.shape[1] + targets[tokens], of_logprobs[tokens])
            if of_entropy is not None:
                total.sub_(own)
            if ctx.temperature != 1:
                total.div_(ctx.temperature)
        return kept.to(ctx.dtype), None, None, None, None


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """Return [m, V] logits over the temperature, in float32 at least."""
    scores = logits.to(_precise(logits))
    return scores if temperature == 1 else scores / temperature


def _blocks(logits: Tensor, rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows with their tokens: on a CPU as many rows as its cache holds, elsewhere all."""
    num_rows, vocabulary = logits.shape
    size = max(BLOCK_ELEMENTS // vocabulary, 1) if logits.device.type == "cpu" else max(num_rows, 1)
    for start, tokens in zip(*_runs(rows, num_rows, size), strict=True):
        yield slice(start, start + size), tokens


def _runs(rows: Tensor, num_rows: int, size: int) -> tuple[range, list[slice]]:
    """Divide rows into runs of `size` and return their starts and tokens; `rows` [n], rising, are the tokens' rows."""
    starts = range(0, num_rows, size)
    if len(starts) < 2:
        return starts, [slice(None)] * len(starts)
    ends = torch.searchsorted(rows, torch.tensor([*starts[1:], num_rows], device=rows.device)).tolist()
    return starts, [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
