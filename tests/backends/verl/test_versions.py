"""Which versions are taken."""

from __future__ import annotations

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
def test_a_version_of_the_range_is_taken(package: str, installed: str) -> None:
    check_version(package, installed)


@pytest.mark.parametrize(
    ("package", "installed", "range_"),
    [("verl", "0.8.0", ">=0.9.0,<0.10"), ("verl", "0.10.0", ">=0.9.0,<0.10"), ("ray", "2.9.3", ">=2.50,<3")],
)
def test_another_is_refused_with_the_range_and_what_was_tested(package: str, installed: str, range_: str) -> None:
    with pytest.raises(ConfigError, match=f"{package} {installed}.*{range_}"):
        check_version(package, installed)


def test_the_extra_asks_for_the_same_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    verl, ray = (">={},<{}".format(*SUPPORTED[package]) for package in ("verl", "ray"))
    assert project["optional-dependencies"]["verl"] == [f"verl{verl}", f"ray[default]{ray}"]


def test_the_page_tells_the_range_and_what_is_tested() -> None:
    page = " ".join((ROOT / "docs" / "verl.md").read_text().split())
    assert "verl from {} and below {}, Ray from {} and below {}".format(*SUPPORTED["verl"], *SUPPORTED["ray"]) in page
    assert f"tested: {TESTED}" in page


def test_an_older_version_is_one_whose_numbers_are_lower() -> None:
    installed = version("torch")
    major, minor = (int(part) for part in installed.split(".")[:2])
    assert is_before("torch", f"{major}.{minor + 1}")
    assert is_before("torch", f"{major}.{minor + 10}")
    assert not is_before("torch", installed)
    assert not is_before("torch", f"{major - 1}.99")


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed here")
def test_without_verl_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"rllm\[verl\]"):
        check_versions()
