"""Which versions are taken."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from rllm.backends.verl.versions import check_version, check_versions
from rllm.errors import ConfigError, MissingDependencyError


@pytest.mark.parametrize(
    ("package", "installed"), [("verl", "0.9.1"), ("verl", "0.9.10"), ("verl", "0.9.2.dev0"), ("ray", "2.60.0")]
)
def test_a_version_of_the_range_is_taken(package: str, installed: str) -> None:
    check_version(package, installed)


@pytest.mark.parametrize(
    ("package", "installed", "range_"),
    [("verl", "0.9.0", ">=0.9.1,<0.10"), ("verl", "0.10.0", ">=0.9.1,<0.10"), ("ray", "2.9.3", ">=2.50,<3")],
)
def test_another_is_refused_with_the_range_and_what_was_tested(package: str, installed: str, range_: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{package} {installed} is installed on node 10.0.0.7.*{range_} .tested: verl 0.9.1"
    ):
        check_version(package, installed, "on node 10.0.0.7")


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed here")
def test_without_verl_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"backend=verl needs the package 'verl'.*rllm\[verl\]"):
        check_versions()
