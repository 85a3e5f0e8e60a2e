"""LoRA (Hu et al. 2021): small matrices beside frozen ones, by peft.

The adapter is never merged into the weights: adding and subtracting it again would leave rounding errors behind, and the
weights without it are the reference.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rllm.backends.coverage import Coverage, by_kind, coverage_of, is_linear
from rllm.errors import ConfigError, MissingDependencyError, first_line
from rllm.inference.local.loading import ADAPTER_WEIGHTS_FILE, load_outline, take_weights, text_parts

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_REFUSED_IN_MAMBA = ("out_proj", "conv1d")
"""Layers that peft refuses in some Mamba models, whose kernels read their weights and pass the layers over."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """See `ModelConfig` for the meaning of each."""

    rank: int
    alpha: float
    targets: list[str] | str = ALL_LINEAR

    @property
    def names(self) -> list[str]:
        return [self.targets] if isinstance(self.targets, str) else list(self.targets)


class Adapter:
    """An adapter inside a model, which is changed in place: only the adapter's weights are trained from then on."""

    def __init__(self, model: Any, settings: LoraSettings, *, seed: int = 0) -> None:
        """
        Raises:
            ConfigError: if the model has no such modules.
            MissingDependencyError: without peft.
        """
        self.settings = settings
        device = next(model.parameters()).device
        targets = _targets(model, settings)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            self._inside = _wrap(model, settings, targets)
        self.coverage = _coverage(model, settings, targets)
        self._inside.peft_config["default"].base_model_name_or_path = _from_anywhere(model.name_or_path)
        if hasattr(model.get_input_embeddings(), "base_layer"):
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: the embeddings are among these, and no linear layer: leave them out, or use "
                f"{ALL_LINEAR}"
            )
        _keep_buffers(self._inside)
        try:
            with torch.no_grad():
                model(input_ids=torch.tensor([[1, 2]], device=device), use_cache=False)
        except Exception as error:  # whatever a layer raises that is not used as a linear one, as some routers are not
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: {type(model).__name__} does not run with an adapter on all of these: "
                f"name those of its attention, such as [q_proj, k_proj, v_proj, o_proj] ({first_line(error)})"
            ) from error
        logger.warning("%s", self.coverage)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the one that it was without the adapter."""
        with self._inside.disable_adapter():
            yield

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, a new adapter, which would change nothing yet, does something.

        Whatever is tried out on the model then shows whether it heeds the adapter.
        """
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
        """Take up what `save` wrote.

        Raises:
            ValueError: if it is another kind of adapter, or of another model.
            OSError, SafetensorError: if there is none, or not all of it.
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
        by_peft: whether peft finds the targets by itself, as in verl's workers, which adapt no weights by name.

    Raises:
        ConfigError: if there is no such model, or if it takes no such adapter.
        MissingDependencyError: without peft.
    """
    model = load_outline(path_or_id)
    targets = _Targets(modules=settings.targets) if by_peft else _targets(model, settings)
    with torch.device("meta"):
        _wrap(model, settings, targets)
    found = _coverage(model, settings, targets)
    return replace(found, adaptable=frozenset()) if by_peft else found


def planned_coverage(config: Any) -> Coverage | None:
    """Return the coverage of a `TrainConfig`'s adapter; `None` if it has none, or a backend of its own.

    Raises:
        ConfigError: see `coverage`.
        MissingDependencyError: without peft.
    """
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


def _targets(model: Any, settings: LoraSettings) -> _Targets:
    """Find out, on a copy without weights, what to ask of peft so that each target gets an adapter.

    In models whose experts have become stacked weights, peft takes `gate_proj` and the like for the experts alone,
    although shared experts and dense layers have linear layers of that name: these are asked for as weights.

    Raises:
        ConfigError: if a target is not there, or takes no adapter.
    """
    targets = _sorted_out(model, settings)
    try:
        trial, config = _tried(model, settings, targets)
    except ConfigError as error:
        if targets.modules != ALL_LINEAR or "incompatible with Mamba" not in str(error):
            raise
        targets = replace(targets, refused=_REFUSED_IN_MAMBA)
        trial, config = _tried(model, settings, targets)
    _check_known(model, settings, config)
    without = coverage_of(trial).without
    missed = {f"{name}.weight" for name in _linear_layers(model, targets)} & without.keys()
    return replace(targets, parameters=sorted({*targets.parameters, *missed}))


def _sorted_out(model: Any, settings: LoraSettings) -> _Targets:
    """Separate names of linear layers, which peft finds, from those of other weights, such as stacked experts.

    Raises:
        ConfigError: if the output head is named beside all linear layers, which are all but it.
    """
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
                f"model.lora_targets={settings.targets!r}: {ALL_LINEAR} leaves {name} out; name all layers to "
                "adapt it, too"
            )
    return _Targets(modules=ALL_LINEAR, parameters=sorted(parameters))


def _tried(model: Any, settings: LoraSettings, targets: _Targets) -> tuple[Any, Any]:
    """Return a copy of a model that has an adapter and no weights, and peft's configuration of it."""
    empty: dict[int, Any] = {}
    for weight in [*model.parameters(), *model.buffers()]:
        made = torch.empty_like(weight, device="meta")
        is_parameter = isinstance(weight, torch.nn.Parameter)
        empty[id(weight)] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
    trial = copy.deepcopy(model, empty)
    with torch.device("meta"):
        return trial, _wrap(trial, settings, targets).peft_config["default"]


def _check_known(model: Any, settings: LoraSettings, config: Any) -> None:
    """
    Raises:
        ConfigError: if a target is not in the model, nor was by a name that peft knows from older versions of it.
    """
    known = {ALL_LINEAR}.union(*(_ends_of(name) for name, _ in [*model.named_modules(), *model.named_parameters()]))
    for name in settings.names:
        if name not in known and (ALL_LINEAR in settings.names or name in config.target_modules):
            raise ConfigError(
                f"model.lora_targets={settings.targets!r}: {type(model).__name__} has no {name!r}; it has "
                f"{', '.join(by_kind(coverage_of(model).without))}; use {ALL_LINEAR} for all of its linear layers"
            )


def _linear_layers(model: Any, targets: _Targets) -> list[str]:
    """Return the names of the linear layers that are targets."""
    beside, head = _beside_text(model), model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and _ends_of(name).isdisjoint(targets.refused) and not (beside and re.match(beside, name))
    ]
    if isinstance(targets.modules, str):
        return [name for name in linear if model.get_submodule(name) is not head]
    return [name for name in linear if not _ends_of(name).isdisjoint(targets.modules)]


def _wrap(model: Any, settings: LoraSettings, targets: _Targets) -> Any:
    """Put an adapter into a model; return peft's model around it."""
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
            f"model.lora_targets={settings.targets!r}: name linear layers of {type(model).__name__}, or use "
            f"{ALL_LINEAR} ({error})"
        ) from error


def _coverage(model: Any, settings: LoraSettings, targets: _Targets) -> Coverage:
    names = _beside_text(model)
    beside = [
        module
        for name, module in model.named_modules()
        if not _ends_of(name).isdisjoint(targets.refused) or (names and re.match(names, name))
    ]
    return coverage_of(model, targets=settings.names, beside=beside)


def _ends_of(name: str) -> set[str]:
    """Return a name and all that it ends with, part by part."""
    parts = name.split(".")
    return {".".join(parts[place:]) for place in range(len(parts))}


def _from_anywhere(source: str) -> str:
    """Where a model comes from, such that who loads its adapter from another folder finds it, too."""
    folder = Path(source).expanduser()
    return str(folder.absolute()) if source and folder.is_dir() else source


def _beside_text(model: Any) -> str | None:
    """A pattern of the names of layers for images, if there are any: text does not pass them, so nothing would train them, and
    servers take no adapters for them."""
    parts = text_parts(model)
    if parts is None:
        return None
    names = [re.escape(name) for name, module in model.named_modules() if any(module is part for part in parts)]
    return rf"(?!({'|'.join(names)})(\.|$)).*"


def _keep_buffers(inside: torch.nn.Module) -> None:
    """Let what peft puts around a router, whose weight is no linear layer's, have the router's buffers: models look there for
    them, as DeepSeek V3 and GLM 4.5 for the bias that balances experts."""
    for module in inside.modules():
        if type(module).__name__ == "ParamWrapper":
            for name, buffer in module.get_base_layer().named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingDependencyError.of("peft", "train", "LoRA (model.lora_rank)") from error
    return peft
