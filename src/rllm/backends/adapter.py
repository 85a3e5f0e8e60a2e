"""LoRA (Hu et al. 2021): small matrices beside frozen ones, by peft.

The adapter is never merged into the weights: adding and subtracting it again would leave rounding errors behind, and the
weights without it are the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rllm.errors import ConfigError, MissingDependencyError, first_line
from rllm.inference.local.loading import ADAPTER_WEIGHTS_FILE, take_weights, text_parts

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """See `ModelConfig` for the meaning of each."""

    rank: int
    alpha: float
    targets: list[str] | str = ALL_LINEAR


class Adapter:
    """An adapter inside a model, which is changed in place: only the adapter's weights are trained from then on."""

    def __init__(self, model: Any, settings: LoraSettings, *, seed: int = 0) -> None:
        """
        Raises:
            ConfigError: if the model has no such modules.
            MissingDependencyError: without peft.
        """
        peft = _peft()
        targets = settings.targets if settings.targets == ALL_LINEAR else list(settings.targets)
        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=targets,
            exclude_modules=_beside_text(model),
            task_type="CAUSAL_LM",
        )
        self.settings = settings
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                self._inside = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
            except ValueError as error:
                raise ConfigError(
                    f"model.lora_targets={settings.targets!r}: name linear layers of {type(model).__name__}, or use "
                    f"{ALL_LINEAR} ({error})"
                ) from error
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
