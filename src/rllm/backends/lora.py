"""LoRA adapters (Hu et al. 2021), by peft: small matrices next to frozen weights, and which weights they cover.

The adapter is never merged into the weights: adding and subtracting it would leave rounding errors behind, and the
weights without it are the reference.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module

from rllm.config.schema import TrainConfig, refuse_changes
from rllm.errors import ConfigError, MissingDependencyError, first_line
from rllm.inference.local.loading import (
    ADAPTER_WEIGHTS_FILE,
    MERGE_IT,
    is_adapter,
    load_outline,
    take_weights,
    text_parts,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_REFUSED_IN_MAMBA = ("out_proj", "conv1d")
"""Layers that peft refuses in some Mamba models, whose kernels read their weights and pass the layers over."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Settings of an adapter; see `ModelConfig` for the meaning of each."""

    rank: int
    alpha: float
    targets: list[str] | str = ALL_LINEAR

    @classmethod
    def from_config(cls, config: TrainConfig) -> LoraSettings | None:
        """Return the adapter's settings, or `None` if there is none.

        Raises:
            ConfigError: if there is none and one of its settings is set, or if the model is itself an adapter.
        """
        model = config.model
        if model.lora_rank and is_adapter(model.path):
            raise ConfigError(
                f"model.lora_rank={model.lora_rank}: model.path={model.path!r} is a LoRA adapter already, which "
                f"checkpoints of a second one would not include: {MERGE_IT}"
            )
        if model.lora_rank:
            return cls(rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)
        refuse_changes(model, "model", ("lora_alpha", "lora_targets"), "without an adapter; set model.lora_rank, too")
        return None

    @property
    def names(self) -> list[str]:
        return [self.targets] if isinstance(self.targets, str) else list(self.targets)


class Adapter:
    """Adapter inside a model, which is changed in place: only the adapter's weights are trained from then on."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0) -> None:
        """Put a new adapter into the model and try it out; raise `ConfigError` if the model has no such modules."""
        self.settings = settings
        device = next(model.parameters()).device
        targets = _targets(model, settings)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            self._inside = _wrap(model, settings, targets)
        self.coverage = _coverage(model, settings, targets)
        source, folder = model.name_or_path, Path(model.name_or_path).expanduser()
        if source and folder.is_dir():  # so that the adapter can be loaded from any folder
            source = str(folder.absolute())
        self._inside.peft_config["default"].base_model_name_or_path = source
        if hasattr(model.get_input_embeddings(), "base_layer"):
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: the embeddings are not a linear layer: leave them out, or "
                f"use {ALL_LINEAR}"
            )
        # Models look for a router's buffers in peft's wrapper around it, such as the bias that balances experts in
        # DeepSeek V3 and GLM 4.5.
        for module in self._inside.modules():
            if type(module).__name__ == "ParamWrapper":
                for name, buffer in module.get_base_layer().named_buffers(recurse=False):
                    module.register_buffer(name, buffer, persistent=False)
        try:
            with torch.no_grad():
                model(input_ids=torch.tensor([[1, 2]], device=device), use_cache=False)
        except Exception as error:  # layers that are not used as linear ones, such as some routers, may raise anything
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: {type(model).__name__} does not run with an adapter on all "
                f"of these: use its attention layers, such as [q_proj, k_proj, v_proj, o_proj] ({first_line(error)})"
            ) from error
        logger.warning("%s", self.coverage)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapter off inside the block."""
        with self._inside.disable_adapter():
            yield

    @contextmanager
    def with_effect(self) -> Iterator[None]:
        """Give a new adapter an effect inside the block, so that trials show whether the model uses it."""
        started = [weight for name, weight in self._inside.named_parameters() if ".lora_B." in name]
        with torch.no_grad():
            for weight in started:
                weight.normal_(std=0.02, generator=torch.Generator(weight.device).manual_seed(0))
        try:
            yield
        finally:
            for weight in started:
                torch.nn.init.zeros_(weight)

    def save(self, folder: Path) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`."""
        self._inside.save_pretrained(folder, save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        """Load the adapter's weights from what `save` wrote.

        Raises:
            ValueError: if it is another kind of adapter, or of another model.
            OSError, SafetensorError: if it is missing or incomplete.
        """
        peft = _peft()
        saved = load_file(folder / ADAPTER_WEIGHTS_FILE)
        own = peft.get_peft_model_state_dict(self._inside, save_embedding_layers=False)
        shapes = [{name: weight.shape for name, weight in weights.items()} for weights in (saved, own)]
        if shapes[0] != shapes[1]:
            raise ValueError("its adapter has other matrices: keep model.lora_rank and model.lora_targets")
        config = peft.LoraConfig.from_pretrained(str(folder))
        if config.lora_alpha != self.settings.alpha:
            raise ValueError(f"its adapter has lora_alpha={config.lora_alpha}: keep model.lora_alpha")
        take_weights(own, saved)


def coverage(path_or_id: str | Path, settings: LoraSettings, *, by_peft: bool = False) -> Coverage:
    """Return the coverage that an adapter of a model will have, without loading the model's weights.

    Args:
        path_or_id: see `load_model`.
        settings: of the adapter.
        by_peft: let peft alone find the targets, as verl's workers do, which adapt no weights by name.

    Raises:
        ConfigError: if the model does not exist, or if it cannot have such an adapter.
        MissingDependencyError: without peft.
    """
    model = load_outline(path_or_id)
    targets = _Targets(modules=settings.targets) if by_peft else _targets(model, settings)
    with torch.device("meta"):
        _wrap(model, settings, targets)
    found = _coverage(model, settings, targets)
    return replace(found, adaptable=frozenset()) if by_peft else found


def planned_coverage(config: TrainConfig) -> Coverage | None:
    """Return the coverage of a run's adapter; `None` if it has none, or a backend of the user's own."""
    model = config.model
    if not model.lora_rank or config.backend not in ("local", "verl"):
        return None
    settings = LoraSettings(rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)
    return coverage(model.path, settings, by_peft=config.backend == "verl")


@dataclass(frozen=True, kw_only=True)
class _Targets:
    """Weights that get an adapter, in peft's terms."""

    modules: str | Sequence[str]
    parameters: Sequence[str] = ()
    """Names of weights that peft does not reach by the names of modules."""
    refused: Sequence[str] = ()
    """Last parts of the names of modules that get none."""


def _targets(model: PreTrainedModel, settings: LoraSettings) -> _Targets:
    """Find out, on a copy without weights, how to ask peft for an adapter on each target.

    In models whose experts are stacked weights, peft takes `gate_proj` and the like for the experts alone, although
    shared experts and dense layers have linear layers of that name: these are passed to peft as weights.

    Raises:
        ConfigError: if a target does not exist, or cannot have an adapter.
    """
    targets = _by_name(model, settings)
    try:
        trial, config = _trial(model, settings, targets)
    except ConfigError as error:
        if targets.modules != ALL_LINEAR or "incompatible with Mamba" not in str(error):
            raise
        targets = replace(targets, refused=(*targets.refused, *_REFUSED_IN_MAMBA))
        trial, config = _trial(model, settings, targets)
    # A target may have an older name, which peft has translated.
    known = {ALL_LINEAR}.union(*(_ends_of(name) for name, _ in [*model.named_modules(), *model.named_parameters()]))
    for name in settings.names:
        if name not in known and (ALL_LINEAR in settings.names or name in config.target_modules):
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: {type(model).__name__} has no {name!r}; it has "
                f"{', '.join(by_kind(coverage_of(model).without))}; use {ALL_LINEAR} for all of its linear layers"
            )
    without = coverage_of(trial).without
    missed = {f"{name}.weight" for name in _linear_layers(model, targets)} & without.keys()
    return replace(targets, parameters=sorted({*targets.parameters, *missed}))


def _by_name(model: PreTrainedModel, settings: LoraSettings) -> _Targets:
    """Separate names of linear layers, which peft finds, from names of other weights, such as stacked experts."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    linear = {f"{name}.weight" for name, module in model.named_modules() if is_linear(module) or module in ends}
    weights = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.dim() in (2, 3)}
    modules, parameters = [], set()
    for target in settings.names:
        found = {name for name in weights if target in _ends_of(name) | _ends_of(name.removesuffix(".weight"))}
        parameters |= found - linear
        if not found or found & linear:
            modules.append(target)
    if ALL_LINEAR not in settings.names:
        return _Targets(modules=modules, parameters=sorted(parameters))
    for name, module in model.named_modules():
        if module in ends and not _ends_of(name).isdisjoint(modules):
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: {ALL_LINEAR} leaves {name} out; list all layers to adapt "
                "it, too"
            )
    other = {name.rpartition(".")[2] for name, module in model.named_modules() if _computes_otherwise(module)}
    return _Targets(modules=ALL_LINEAR, parameters=sorted(parameters), refused=sorted(other - {*settings.names}))


def _trial(model: PreTrainedModel, settings: LoraSettings, targets: _Targets) -> tuple[PreTrainedModel, LoraConfig]:
    """Return a copy of a model with an adapter and without weights, and peft's configuration of it."""
    empty: dict[int, Tensor] = {}
    for weight in [*model.parameters(), *model.buffers()]:
        made = torch.empty_like(weight, device="meta")
        is_parameter = isinstance(weight, torch.nn.Parameter)
        empty[id(weight)] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
    trial = copy.deepcopy(model, empty)
    with torch.device("meta"):
        return trial, _wrap(trial, settings, targets).peft_config["default"]


def _linear_layers(model: PreTrainedModel, targets: _Targets) -> list[str]:
    beside, head = _beside_text(model), model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and _ends_of(name).isdisjoint(targets.refused) and not (beside and re.match(beside, name))
    ]
    if isinstance(targets.modules, str):
        return [name for name in linear if model.get_submodule(name) is not head]
    return [name for name in linear if not _ends_of(name).isdisjoint(targets.modules)]


def _wrap(model: PreTrainedModel, settings: LoraSettings, targets: _Targets) -> PeftModel:
    peft = _peft()
    refused = rf"(.*\.)?({'|'.join(targets.refused)})" if targets.refused else None
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets.modules if isinstance(targets.modules, str) else list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        exclude_modules="|".join(filter(None, [_beside_text(model), refused])) or None,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(
            f"model.lora_targets={settings.targets!r}: list linear layers of {type(model).__name__}, or use "
            f"{ALL_LINEAR} ({error})"
        ) from error


def _coverage(model: PreTrainedModel, settings: LoraSettings, targets: _Targets) -> Coverage:
    names = _beside_text(model)
    beside = [
        module
        for name, module in model.named_modules()
        if not _ends_of(name).isdisjoint(targets.refused) or (names and re.match(names, name))
    ]
    return coverage_of(model, targets=settings.names, beside=beside)


def _ends_of(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[place:]) for place in range(len(parts))}


def _beside_text(model: PreTrainedModel) -> str | None:
    """Return a pattern of the names of layers for images, if there are any.

    Text does not pass them, so nothing would train their adapters, and servers take none for them.
    """
    parts = text_parts(model)
    if parts is None:
        return None
    names = [re.escape(name) for name, module in model.named_modules() if any(module is part for part in parts)]
    return rf"(?!({'|'.join(names)})(\.|$)).*"


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingDependencyError.of("peft", "train", "LoRA (model.lora_rank)") from error
    return peft


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Sizes of a model's matrices by parameter name: those with an adapter and those without one."""

    num_weights: int
    """All numbers of the model, vectors included; shared weights count once."""
    adapted: Mapping[str, int]
    without: Mapping[str, int]
    adaptable: frozenset[str]
    """Names in `without` that can have an adapter: linear layers and stacked experts."""
    targets: Sequence[str]
    """`model.lora_targets` as a list."""

    @property
    def fraction(self) -> float:
        """Adapted fraction of all weights."""
        return sum(self.adapted.values()) / max(self.num_weights, 1)

    def __str__(self) -> str:
        missing = by_kind(self.without)
        listed = ", ".join(f"{kind} ({_percent(size / self.num_weights)})" for kind, size in missing.items())
        text = f"LoRA adapts {_percent(self.fraction)} of the weights: {', '.join(by_kind(self.adapted))}"
        if missing:
            text += f"; without an adapter: {listed}"
        more = by_kind({name: size for name, size in self.without.items() if name in self.adaptable})
        if more:
            text += f"; model.lora_targets=[{','.join([*self.targets, *more])}] adapts {', '.join(more)}, too"
        return text


def coverage_of(model: PreTrainedModel, *, targets: Sequence[str] = (), beside: Sequence[Module] = ()) -> Coverage:
    """Return the coverage of a model, by the adapter inside it if it has one; modules `beside` are to have none."""
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
            is_stacked = weight.dim() == 3 and not type(module).__name__.startswith("Conv")
            if id(weight) not in excluded and (is_linear(module) or is_stacked):
                adaptable.add(name)
    return Coverage(
        num_weights=sum(sizes.values()),
        adapted=adapted,
        without=without,
        adaptable=frozenset(adaptable),
        targets=targets,
    )


def is_linear(module: Module) -> bool:
    """Return whether peft adapts a module as a linear layer; GPT-2's `Conv1D` is one with its weight transposed."""
    is_torch_linear = isinstance(module, torch.nn.Linear) and not _computes_otherwise(module)
    return is_torch_linear or type(module).__name__ == "Conv1D"


def _computes_otherwise(module: Module) -> bool:
    """Return whether a module is a linear layer in name only.

    The routers of Llama 4 and Phi-MoE return their choice of experts, and a layer of DeepSeek V4 multiplies by group.
    """
    if not isinstance(module, torch.nn.Linear) or not type(module).__module__.startswith("transformers.models."):
        return False
    if type(module).forward is torch.nn.Linear.forward:
        return False
    try:
        with torch.no_grad():
            output = module(module.weight.new_zeros(2, module.in_features))
    except (RuntimeError, ValueError, IndexError):  # it takes other shapes
        return True
    return not isinstance(output, Tensor) or output.shape != (2, module.out_features)


def by_kind(weights: Mapping[str, int]) -> Counter[str]:
    """Return sizes by the last two parts of names, which are alike in all layers, the largest first."""
    sizes: Counter[str] = Counter()
    for name, size in weights.items():
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdecimal()]
        sizes[".".join(parts[-2:]).removeprefix("model.")] += size
    return Counter(dict(sizes.most_common()))


def _own_weights(model: Module) -> Iterator[tuple[str, Module, Tensor]]:
    """Return the model's own weights by the names that they have without an adapter, with their modules."""
    for module_name, module in model.named_modules():
        if "lora_" not in module_name:
            for name, weight in module.named_parameters(recurse=False):
                yield f"{module_name}.{name}".replace(".base_layer", ""), module, weight


def _wrapped_weights(model: Module) -> Iterator[Tensor]:
    try:
        from peft.tuners.lora import LoraLayer
    except ModuleNotFoundError:
        return
    for module in model.modules():
        if isinstance(module, LoraLayer):
            yield getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"
