"""Supported versions of packages."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from rllm.backends.verl.cluster import SUPPORTED, TESTED, check_version, check_versions, is_before
from rllm.errors import ConfigError, MissingDependencyError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("package", "installed"), [("verl", "0.9.0"), ("verl", "0.9.10"), ("verl", "0.9.2.dev0"), ("ray", "2.60.0")]
)
def test_version_within_the_range_is_accepted(package: str, installed: str) -> None:
    check_version(package, installed)


@pytest.mark.parametrize(
    ("package", "installed", "range_"),
    [("verl", "0.8.0", ">=0.9.0,<0.10"), ("verl", "0.10.0", ">=0.9.0,<0.10"), ("ray", "2.9.3", ">=2.50,<3")],
)
def test_other_version_error_names_the_range_and_the_tested_versions(package: str, installed: str, range_: str) -> None:
    with pytest.raises(ConfigError, match=f"{package} {installed}.*{range_}"):
        check_version(package, installed)


def test_extra_requires_the_same_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["verl"] == [f"verl{SUPPORTED['verl']}", f"ray[default]{SUPPORTED['ray']}"]


def test_page_documents_the_range_and_the_tested_versions() -> None:
    page = " ".join((ROOT / "docs" / "verl.md").read_text().split())
    bounds = re.findall(r"[\d.]+", f"{SUPPORTED['verl']} {SUPPORTED['ray']}")
    assert "verl from {} and below {}, Ray from {} and below {}".format(*bounds) in page
    assert f"tested: {TESTED}" in page


def test_versions_are_compared_by_numbers() -> None:
    installed = version("torch")
    major, minor = (int(part) for part in installed.split(".")[:2])
    assert is_before("torch", f"{major}.{minor + 1}")
    assert is_before("torch", f"{major}.{minor + 10}")
    assert not is_before("torch", installed)
    assert not is_before("torch", f"{major - 1}.99")


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed here")
def test_missing_verl_error_names_the_extra() -> None:
    with pytest.raises(MissingDependencyError, match=r"rllm\[verl\]"):
        check_versions()
