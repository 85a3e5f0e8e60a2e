"""Weights of a model that have a LoRA adapter, and those that have none, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Every matrix of a model, by the name of its parameter with its size: with an adapter, or without one."""

    num_weights: int
    """All numbers of the model, vectors included; what several modules share counts once."""
    adapted: Mapping[str, int]
    without: Mapping[str, int]
    adaptable: frozenset[str]
    """Those of `without` that can have an adapter: linear layers and stacked experts."""
    targets: Sequence[str]
    """`model.lora_targets` as a list."""

    @property
    def share(self) -> float:
        return sum(self.adapted.values()) / max(self.num_weights, 1)

    def __str__(self) -> str:
        missing = by_kind(self.without)
        listed = ", ".join(f"{kind} ({_percent(size / self.num_weights)})" for kind, size in missing.items())
        told = f"LoRA adapts {_percent(self.share)} of the weights: {', '.join(by_kind(self.adapted))}"
        if missing:
            told += f"; without an adapter: {listed}"
        more = by_kind({name: size for name, size in self.without.items() if name in self.adaptable})
        if more:
            told += f"; model.lora_targets=[{','.join([*self.targets, *more])}] adapts {', '.join(more)}, too"
        return told


def coverage_of(model: Any, *, targets: Sequence[str] = (), beside: Sequence[Any] = ()) -> Coverage:
    """Return what an adapter inside a model reaches.

    Args:
        model: with peft's layers in it, or without.
        targets: see `Coverage`.
        beside: modules that are not to have an adapter.
    """
    wrapped = {id(weight) for weight in _wrapped_weights(model)}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    excluded = {id(weight) for part in [*ends, *beside] if part is not None for weight in part.parameters()}
    sizes: dict[int, int] = {}
    adapted, without, adaptable = {}, {}, set()
    for name, module, weight in _own_weights(model):
        if id(weight) in sizes:
            continue
        sizes[id(weight)] = weight.numel()
        if id(weight) in wrapped:
            adapted[name] = weight.numel()
        elif weight.dim() >= 2:
            without[name] = weight.numel()
            if id(weight) not in excluded and _takes_adapter(module, weight):
                adaptable.add(name)
    return Coverage(
        num_weights=sum(sizes.values()),
        adapted=adapted,
        without=without,
        adaptable=frozenset(adaptable),
        targets=targets,
    )


def is_linear(module: Any) -> bool:
    """Return whether peft adapts a module as a linear layer; GPT-2's `Conv1D` is one with its weight transposed."""
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def by_kind(weights: Mapping[str, int]) -> Counter[str]:
    """Return sizes by the last two parts of names, which are alike in all layers, the largest first."""
    sizes: Counter[str] = Counter()
    for name, size in weights.items():
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdecimal()]
        sizes[".".join(parts[-2:]).removeprefix("model.")] += size
    return Counter(dict(sizes.most_common()))


def _own_weights(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return the model's own weights by the names that they have without an adapter, with their modules."""
    for module_name, module in model.named_modules():
        if "lora_" not in module_name:
            for name, weight in module.named_parameters(recurse=False):
                yield f"{module_name}.{name}".replace(".base_layer", ""), module, weight


def _wrapped_weights(model: Any) -> Iterator[Any]:
    try:
        from peft.tuners.lora import LoraLayer
    except ModuleNotFoundError:
        return
    for module in model.modules():
        if isinstance(module, LoraLayer):
            yield getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"))


def _takes_adapter(module: Any, weight: Any) -> bool:
    return is_linear(module) or (weight.dim() == 3 and not type(module).__name__.startswith("Conv"))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
