"""Errors about missing optional packages name the extra."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.data import Dataset, DatasetRegistry
from rllm.errors import MissingDependencyError


@pytest.mark.parametrize(
    ("package", "use", "purpose"),
    [
        ("pyarrow", lambda: Dataset.load("tasks.parquet"), r"reading tasks\.parquet"),
        ("pyarrow", lambda: DatasetRegistry.register_dataset("a", [{"n": 1}]).get_verl_data_path(), "writing default"),
        ("datasets", lambda: Dataset.load("hf:org/name"), "'org/name'"),
    ],
)
def test_missing_package_error_names_the_extra(
    home: Path, monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[], object], purpose: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to fail an import
    with pytest.raises(MissingDependencyError, match=rf"{purpose}.* needs the package '{package}'.*'rllm\[data\]'"):
        use()
