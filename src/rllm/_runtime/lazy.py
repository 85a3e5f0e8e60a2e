"""Names of a package that load on first use, so that importing the package costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rllm.errors import needed_to_train


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562) whose names live in the modules that `homes` gives."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needed_to_train(f"{package}.{name}"):
            return getattr(import_module(homes[name]), name)

    return get, lambda: sorted(homes)
