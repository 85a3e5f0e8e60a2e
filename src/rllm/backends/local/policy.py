"""A causal language model as log-probabilities of a batch's tokens: the policy, its reference, and a local teacher.

`Trunk` runs the model's body over the batch's prefix tree, with gradient checkpointing if asked for; `Policy` adds the
head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rllm.algorithms.batch import Batch
from rllm.backends.local.forward import HiddenStates, choose_forward, separate_hidden_states
from rllm.backends.local.logprobs import Head, body_of, energies, logprobs_and_entropy
from rllm.backends.local.summed_gradients import can_sum, summed, summed_linear
from rllm.config.sizes import ModelShape
from rllm.errors import ConfigError, first_line
from rllm.inference.local.loading import LoadedModel
from rllm.inference.local.model_forward import check_causal, use_grouped_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """A model without its head, and how it is run."""

    module: PreTrainedModel
    hidden_states: HiddenStates
    autocast: bool = False
    """Run matrix products in bfloat16, whatever the format of the weights."""
    recompute: bool = False
    """Run layers again in the backward pass instead of keeping their activations."""
    max_tokens_kept: int | None = None
    """Tokens of a pass above which layers are always run again, if the model allows it."""

    @classmethod
    def of(
        cls,
        module: PreTrainedModel,
        *,
        autocast: bool = False,
        recompute: bool = False,
        max_tokens_kept: int | None = None,
    ) -> Trunk:
        """Return the module with the fastest forward pass that suits it.

        Raises:
            ConfigError: if `recompute` is set and the module's layers cannot be run again.
        """
        if recompute:
            check_recomputing(module)
        use_grouped_attention(module)
        forward = choose_forward(module)
        return cls(
            module=module,
            hidden_states=forward,
            autocast=autocast,
            recompute=recompute,
            max_tokens_kept=max_tokens_kept,
        )

    def like(self, module: PreTrainedModel) -> Trunk:
        """Return a module of the same kind, run in the same way."""
        return replace(self, module=module)

    def pass_tokens(self) -> int | None:
        """Return the tokens at which a pass should end, see `Batch.split`; `None` on a GPU, which wants large ones."""
        shape = ModelShape.of(self.module.config.get_text_config(decoder=True).to_dict())
        if self.device.type != "cpu" or shape is None:
            return None
        weights = sum(weight.nbytes for weight in self.module.parameters())
        return shape.pass_tokens(weights, next(self.module.parameters()).dtype.itemsize)

    def _saving_memory(self, num_tokens: int) -> AbstractContextManager[object]:
        is_long = self.max_tokens_kept is not None and num_tokens > self.max_tokens_kept
        if self.recompute or (is_long and self._can_recompute):
            layers = recomputable_layers(self.module)
            inside = {part for layer in layers for part in layer.modules()}
            return running_otherwise({**summed(set(self.module.modules()) - inside), **_run_again(layers, summed)})
        products = running_products_again(self._gated_layers)
        # Layers that are run again outside this block have to be the same in it.
        again = {part for layer in products if not can_sum(layer.down_proj) for part in layer.down_proj.modules()}
        return running_otherwise({**summed(set(self.module.modules()) - again), **products})

    @cached_property
    def _can_recompute(self) -> bool:
        """Return whether the layers can be run again; checked and logged once, at the first long sequence."""
        sequence = f"a sequence has more than optim.micro_batch_tokens={self.max_tokens_kept} tokens"
        try:
            check_recomputing(self.module)
        except ConfigError as error:
            logger.warning("%s, and all of its activations are kept: %s", sequence, error)
            return False
        logger.warning(
            "%s: the layers of such sequences are run again in the backward pass, as with "
            "model.gradient_checkpointing=true, which takes a third longer",
            sequence,
        )
        return True

    @cached_property
    def _gated_layers(self) -> list[Module]:
        return gated_layers(self.module)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.module.parameters()).device
        return device

    def arithmetic(self) -> AbstractContextManager[object]:
        """Return a context with the number format of the forward pass."""
        context: AbstractContextManager[object] = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.autocast
        )
        return context

    def before_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hidden states that sampled tokens are predicted from.

        Returns:
            [U, hidden size] the states, each once; and [N] the index of each token's state, which is the state of the
            token before it.
        """
        before: list[int] = []
        for index, sequence in enumerate(batch.sequences):
            positions = batch.tree.positions(index)
            before.extend(positions[place - 1] for place in sequence.sampled_positions())
        sources, state_of = torch.tensor(before, dtype=torch.long).unique(return_inverse=True)
        with self._saving_memory(len(batch.tree.ids)) if torch.is_grad_enabled() else nullcontext():
            states = self.hidden_states(self.module, batch.tree)
        return states.index_select(0, sources.to(self.device)), state_of.to(self.device)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model with its head."""

    model: PreTrainedModel
    trunk: Trunk
    """The model without its head (`body_of`)."""
    head: Head

    @classmethod
    def of(cls, model: PreTrainedModel, trunk: Trunk) -> Self:
        """Return the policy of a model; raise `ConfigError` if its head is of an unknown kind, or it is not causal."""
        if trunk.hidden_states is separate_hidden_states:  # the other ways were compared with passes over prefixes
            check_causal(model)
        return cls(model=model, trunk=trunk, head=Head.of(model))

    def logprobs(self, batch: Batch, *, entropy: bool = True, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N] of the batch's tokens, and entropies [N] of what they were drawn from."""
        with self.trunk.arithmetic():
            states, state_of = self.trunk.before_tokens(batch)
            return logprobs_and_entropy(
                states,
                self.head,
                batch.ids.to(self.trunk.device),
                state_of=state_of,
                temperature=batch.temperature,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
            )

    def score(self, batch: Batch, max_tokens: int) -> Tensor:
        return score_in_parts(batch, max_tokens, lambda part: self.logprobs(part, entropy=False)[0])

    def energies(self, batch: Batch, max_tokens: int) -> Tensor:
        """Return [N] the energies of the batch's tokens; see `logprobs.energies`."""

        def of_part(part: Batch) -> Tensor:
            with self.trunk.arithmetic():
                states, state_of = self.trunk.before_tokens(part)
                ids = part.ids.to(self.trunk.device)
                return energies(states, self.head, ids, state_of=state_of, temperature=part.temperature)

        return score_in_parts(batch, max_tokens, of_part)


def score_in_parts(batch: Batch, max_tokens: int, score: Callable[[Batch], Tensor]) -> Tensor:
    """Return [N] scores of the batch, part by part of at most `max_tokens`; without gradient, in main memory."""
    pieces = [torch.zeros(0)]
    with torch.no_grad():
        pieces += [score(batch.select(indices)).cpu() for indices in batch.split(max_tokens)]
    return torch.cat(pieces)


class FrozenCopy:
    """Reference: the model that a run began with, against which divergence is measured; loaded when it is first used.

    It comes from where the run's model came from and never from the weights in training, so it is the same one after
    any number of updates and in every resumed run.
    """

    def __init__(self, load: Callable[[], LoadedModel], policy: Policy, *, offload: bool = False) -> None:
        """Prepare the original model, run as the policy is; `offload` keeps it in main memory between uses."""
        self._load = load
        self._like = policy
        self.offload = offload
        self._policy: Policy | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights; 0 before it is first used."""
        return 0 if self._policy is None else sum(weight.nbytes for weight in self._policy.model.parameters())

    @contextmanager
    def __call__(self) -> Iterator[Policy]:
        if self._policy is None:
            model = self._load().model.requires_grad_(False)
            # Not the buffers: the frequencies of positions are in float32, whatever the format of the weights.
            for weight in model.parameters():
                weight.data = weight.data.to(self._like.model.dtype)
            # With other kernels the untrained policy would differ from it, if only in the last bit.
            model.set_attn_implementation(self._like.model.config._attn_implementation)
            self._policy = Policy.of(model, self._like.trunk.like(body_of(model)))
        model = self._policy.model
        model.to(self._like.trunk.device)
        try:
            yield self._policy
        finally:
            if self.offload:
                model.to("cpu")


class LocalTeacher:
    """Frozen model in this process that scores the policy's tokens at the temperature they were sampled with."""

    def __init__(self, loaded: LoadedModel, *, micro_batch_tokens: int = 16384) -> None:
        """Prepare the model; raise `ConfigError` if its head is of an unknown kind, or it is not causal."""
        model = loaded.model.requires_grad_(False)
        self._policy = Policy.of(model, Trunk.of(body_of(model)))
        self._max_tokens = micro_batch_tokens

    def score(self, batch: Batch, samples: Sequence[object] = ()) -> Tensor:
        """Return [N] log-probabilities of the batch's tokens; `samples` is not used."""
        return self._policy.score(batch, self._max_tokens)


def recomputable_layers(model: Module) -> list[Module]:
    """Return the layers fit for gradient checkpointing; raise `ConfigError` if the model has none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing=True: {type(model).__name__} has no layers that can be run again; use false"
        )
    return layers


@contextmanager
def running_otherwise(forward_of: Mapping[Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Replace the forward functions of these layers inside the block."""
    for layer, forward in forward_of.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in forward_of:
            del layer.forward


def recomputing(layers: Sequence[Module]) -> AbstractContextManager[None]:
    """Keep only these layers' inputs in forward passes inside the block, and run them again in the backward pass.

    Models run without dropout, so the second pass equals the first.
    """
    return running_otherwise(_run_again(layers, lambda parts: {}))


def _run_again(
    layers: Sequence[Module], within: Callable[[Iterable[Module]], Mapping[Module, Callable[..., Tensor]]]
) -> dict[Module, Callable[..., Tensor]]:
    """Return forward passes under checkpointing.

    `within` returns the forward passes of a layer's parts, the same ones both times.
    """

    def run(layer: Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with running_otherwise(within(layer.modules())):
            return forward(*args, **kwargs)

    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return {layer: partial(again, partial(run, layer, layer.forward)) for layer in layers}


def gated_layers(model: Module) -> list[Module]:
    """Return the layers that compute `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, as most models' MLPs do.

    Each layer that has these names is tried, because some compute something else.
    """
    return [module for module in model.modules() if module._modules.keys() >= _GATED and _is_gated(module)]


_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _is_gated(mlp: Module) -> bool:
    try:
        weight = mlp.gate_proj.weight
        states = torch.linspace(-1, 1, mlp.gate_proj.in_features, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            return bool(mlp(states[None]).equal(_gated_product(mlp, states[None])))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # other arguments, or no linear layers
        return False


def _gated_product(mlp: Module, states: Tensor) -> Tensor:
    """Run a gated MLP, keeping for the backward pass only what its two projections return.

    The activation and the product take little time to compute again, and half of the layer's memory to keep.
    """

    def product(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = mlp.act_fn(gate) * up
        return result

    def down(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = mlp.down_proj(product(gate, up))
        return result

    projected = mlp.gate_proj(states), mlp.up_proj(states)
    if not torch.is_grad_enabled():
        return down(*projected)
    if can_sum(mlp.down_proj):
        return summed_linear(mlp.down_proj, *projected, prepare=product)
    result: Tensor = checkpoint(down, *projected, use_reentrant=False, preserve_rng_state=False)
    return result


def running_products_again(layers: Sequence[Module]) -> dict[Module, Callable[..., Tensor]]:
    """Return forward passes of these gated MLPs that compute activations and products again in the backward pass."""
    return {layer: partial(_gated_product, layer) for layer in layers}


def check_recomputing(model: Module) -> None:
    """Try gradient checkpointing on three tokens.

    Raises:
        ConfigError: if the model has no such layers, or one whose first run changes the second, as in DeepSeek V4,
            whose layers always have a cache.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    weights = [weight for weight in trained if weight.dim() < 2] or trained  # the small ones are in all layers
    with recomputing(recomputable_layers(model)):
        ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
        states = model(input_ids=ids, use_cache=False).last_hidden_state
        try:
            torch.autograd.grad(states.sum(), weights, allow_unused=True)
        except RuntimeError as error:
            raise ConfigError(
                f"model.gradient_checkpointing=True: the layers of {type(model).__name__} cannot be run again; use "
                f"false ({first_line(error)})"
            ) from error
