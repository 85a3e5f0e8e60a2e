from __future__ import annotations

from pathlib import Path

import pytest

from rllm.algorithms import ALGORITHMS
from rllm.backends.base import BACKENDS
from rllm.errors import ConfigError, PluginError
from rllm.registry import closest, did_you_mean, load_object, resolve
from rllm.tracking import TRACKERS

KNOWN = {"ordered": "collections:OrderedDict", "counter": "collections:Counter"}


def test_short_names_and_paths_are_resolved() -> None:
    from collections import Counter, OrderedDict

    assert resolve("ordered", KNOWN) is OrderedDict
    assert resolve("collections:Counter", KNOWN) is Counter
    assert load_object("collections:Counter.most_common") is Counter.most_common


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("orderd", "thing='orderd' is not known: did you mean 'ordered'?"),
        ("zzz", "thing='zzz' is not known: use one of counter, ordered, or 'package.module:Name'"),
        (
            "no_such_package.x:A",
            "thing='no_such_package.x:A': there is no module 'no_such_package.x' on the Python path",
        ),
        ("collections.nothing:A", "there is no module 'collections.nothing'"),
        ("collections:Ordered", "thing='collections:Ordered': module 'collections' has no 'Ordered'"),
    ],
)
def test_unresolvable_name_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name, KNOWN, kind="thing")
    assert message in str(caught.value)


def test_transposed_letters_are_corrected() -> None:
    assert did_you_mean("gpro", ["grpo", "gspo"], "algorithm") == "did you mean 'algorithm.grpo'?"  # gspo is as close


def test_nearest_name_with_the_same_letters_is_suggested() -> None:
    assert closest("20260113", ["20261310", "20260131", "20260114"], cutoff=0.8) == "20260131"
    assert closest("abcd", ["dcba"], cutoff=0.8) == "dcba"
    assert closest("abcd", ["abxy"], cutoff=0.8) is None


@pytest.mark.parametrize(
    ("line", "raised"),
    [
        ("import a_package_that_is_missing", "ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
        ("raise ValueError('no')", "ValueError: no"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_error_in_a_module_shows_only_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, raised: str
) -> None:
    (tmp_path / "users_module.py").write_text(f"x = 1\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as caught:
        resolve("users_module:Thing", KNOWN, kind="thing")
    assert str(caught.value) == (
        "thing='users_module:Thing' cannot be imported:\n"
        f'  File "{tmp_path}/users_module.py", line 2, in <module>\n    {line}\n{raised}'
    )


def test_syntax_error_in_a_module_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_draft.py").write_text("x = 1\nclass Thing(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = rf"thing='users_draft:Thing': {tmp_path}/users_draft\.py, line 2: SyntaxError: invalid syntax"
    with pytest.raises(ConfigError, match=message):
        resolve("users_draft:Thing", KNOWN, kind="thing")


@pytest.mark.parametrize("table", [ALGORITHMS, BACKENDS, TRACKERS])
def test_every_short_name_can_be_imported(table: dict[str, str]) -> None:
    for name in table:
        assert callable(resolve(name, table))
