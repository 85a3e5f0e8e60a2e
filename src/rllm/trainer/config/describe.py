"""A configuration told to a person: every setting with where its value comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.config.schema import TrainConfig
from rllm.trainer.config.load import Layer, setter_of, translated
from rllm.trainer.config.upstream import leaves


@dataclass(frozen=True, kw_only=True)
class DescribedSetting:
    """One setting."""

    key: str
    value: Any
    origin: str
    """`default`, or the layer that set it."""


def described(
    config: TrainConfig,
    layers: Sequence[Layer],
    algorithm: Mapping[str, Any] | None = None,
    *,
    rate_origin: str | None = None,
) -> list[DescribedSetting]:
    """Return every setting of the configuration that these layers make, in the order of the schema.

    Args:
        config: as the trainer settled it.
        layers: where values come from.
        algorithm: all settings of the algorithm, also those that were not set.
        rate_origin: where `optim.lr` is from, if no layer set it.
    """
    published = translated(layers).origins

    def origin(key: str) -> str:
        if key == "num_steps" and config.num_epochs is not None:
            return "num_epochs"
        written = published.get(key, key)
        layer = setter_of(written, layers)
        if key == "optim.lr" and rate_origin is not None:
            return rate_origin
        name = "default" if layer is None else layer.name
        return f"{name}, as {written}" if written != key else name

    values = config.model_dump(mode="json")
    values["algorithm"] = {**values["algorithm"], **(algorithm or {})}
    return [DescribedSetting(key=key, value=value, origin=origin(key)) for key, value in leaves(values)]
