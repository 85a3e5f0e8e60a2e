"""Names of a package that load on first use, so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rllm.errors import needed_to_train


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` (PEP 562) and `__all__` of a package whose names are defined in other modules.

    Args:
        package: name of the package.
        modules: names by the module that defines them, with spaces between.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needed_to_train(f"{package}.{name}"):
            return getattr(import_module(homes[name]), name)

    return get, lambda: sorted(homes), sorted(homes)
