"""Which versions of verl and Ray this backend is for, and whether those that are installed are among them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rllm.errors import ConfigError, MissingDependencyError

SUPPORTED: dict[str, tuple[str, str]] = {"verl": ("0.9.0", "0.10"), "ray": ("2.50", "3")}
"""From the first version on, and below the second."""
TESTED = "verl 0.9.0 and 0.9.1 with Ray 2.60"


def check_versions() -> None:
    """
    Raises:
        MissingDependencyError: if verl or Ray is not installed.
        ConfigError: if one of them is too old or too new.
    """
    for package in SUPPORTED:
        if find_spec(package) is None:
            raise MissingDependencyError.of(package, "verl", "backend=verl")
        try:
            installed = version(package)
        except PackageNotFoundError as error:
            raise MissingDependencyError.of(package, "verl", "backend=verl") from error
        check_version(package, installed)


def check_version(package: str, installed: str, where: str = "here") -> None:
    """
    Raises:
        ConfigError: if a package is outside of the range, told with where it is.
    """
    low, high = SUPPORTED[package]
    if not _numbers(low) <= _numbers(installed) < _numbers(high):
        raise ConfigError(
            f"backend=verl: {package} {installed} is installed {where}, and this version of rllm works with {package} "
            f">={low},<{high} (tested: {TESTED}): pip install '{package}>={low},<{high}'"
        )


def is_before(package: str, first: str) -> bool:
    """Whether the version that is installed is older than this one."""
    return _numbers(version(package)) < _numbers(first)


def _numbers(text: str) -> tuple[int, ...]:
    """A release as numbers; what follows them, as in 0.10.0.dev1, does not count."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)
