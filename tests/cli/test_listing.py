"""`rllm list`: every name that another command accepts, with a line about it."""

import json
import sys

import pytest

from rllm import cli
from rllm.algorithms import ALGORITHMS
from rllm.data.benchmarks import BENCHMARKS
from rllm.environments.named import SCHEMES, Scheme
from rllm.registry import load_object
from rllm.sandbox.base import BACKENDS

from .conftest import as_a_program


def printed_by(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rllm", "list", *arguments])
    with as_a_program(), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_algorithms_are_listed_with_their_docstring_summary(monkeypatch, capsys):
    rows = json.loads(printed_by(["algorithms", "--json"], monkeypatch, capsys))["algorithms"]
    lines = {name: load_object(path).__doc__.partition("\n")[0] for name, path in ALGORITHMS.items()}
    assert {row["name"]: row["about"] for row in rows} == lines


def test_benchmarks_are_listed_with_their_splits(monkeypatch, capsys):
    rows = json.loads(printed_by(["benchmarks", "--json"], monkeypatch, capsys))["benchmarks"]
    assert [row["name"] for row in rows] == list(BENCHMARKS)
    splits = {row["name"]: (row["tasks"], row["splits"]) for row in rows}
    assert splits["math500"] == ("HuggingFaceH4/MATH-500", ["test"])
    assert splits["countdown"] == ("generated", ["train", "test"])
    table = printed_by(["benchmarks"], monkeypatch, capsys)
    assert all(name in table for name in BENCHMARKS)


def test_agents_are_listed_by_importable_paths(monkeypatch, capsys):
    rows = json.loads(printed_by(["agents", "--json"], monkeypatch, capsys))["agents"]
    assert "rllm.agents:ToolAgent" in {row["name"] for row in rows}
    for row in rows:
        if row["works"] == "in environments":
            load_object(row["name"])()
    assert {"terminus", "codex"} <= {row["name"] for row in rows if row["works"] == "in sandboxes"}


def test_sandboxes_are_listed_with_missing_requirements(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    rows = json.loads(printed_by(["sandboxes", "--json"], monkeypatch, capsys))["sandboxes"]
    found = {row["name"]: row["works here"] for row in rows}
    assert set(BACKENDS) <= set(found)
    assert found["podman"].startswith("no: podman is not installed")


def test_environment_schemes_are_listed_with_their_extras(monkeypatch, capsys):
    rows = json.loads(printed_by(["envs", "--json"], monkeypatch, capsys))["envs"]
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    gymnasium = next(row for row in rows if row["scheme"] == "gymnasium")
    assert (gymnasium["extra"], gymnasium["installed"]) == ("rllm[gym]", True)
    monkeypatch.setitem(SCHEMES, "other", Scheme("a:b", "", "no_such_package", "x", f"{__name__}:names"))
    table = printed_by(["envs"], monkeypatch, capsys)
    assert [line.split()[5] for line in table.splitlines() if " other " in line] == ["no"]


def names():
    return ["chess", "go"]


def test_names_of_a_scheme_are_listed_if_its_package_lists_them(monkeypatch, capsys):
    monkeypatch.setitem(SCHEMES, "games", Scheme("a:b", "", names=f"{__name__}:names"))
    assert json.loads(printed_by(["envs", "games", "--json"], monkeypatch, capsys)) == {
        "envs": [{"name": "chess"}, {"name": "go"}]
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["envs", "gymnasum"], 2, "did you mean 'gymnasium'?"),
        (["envs", "mcp"], 2, "are not listed"),
        (["envs", "other"], 1, "rllm[x]"),
        (["agents", "mcp"], 2, "leave mcp out"),
    ],
)
def test_list_that_cannot_be_printed_is_rejected(monkeypatch, fails, arguments, code, message):
    monkeypatch.setitem(SCHEMES, "other", Scheme("a:b", "", "no_such_package", "x", f"{__name__}:names"))
    ended, errors = fails("list", *arguments)
    assert (ended, message in errors) == (code, True), errors


def test_unknown_list_error_suggests_the_nearest_name(fails):
    code, errors = fails("list", "algoritms")
    assert (code, "did you mean 'algorithms'?" in errors) == (2, True)
