from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import rllm

PROGRAMS = {"rllm.__main__", "rllm.demo.agent"}
"""The command itself, and an agent that creates its client on import; the tests of the command line run both."""
IN_WORKERS = {"rllm.backends.verl.platform_cpu", "rllm.backends.verl.worker"}
"""Modules that subclass verl's classes, and are imported by its processes only."""
MODULES = sorted(
    {info.name for info in pkgutil.walk_packages(rllm.__path__, "rllm.")}
    - PROGRAMS
    - (set() if find_spec("verl") else IN_WORKERS)
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


BENCHMARKS = sorted(Path(__file__).parents[1].glob("benchmarks/**/*.py"))


@pytest.mark.parametrize("program", BENCHMARKS, ids=lambda program: program.stem)
def test_every_name_imported_by_a_benchmark_exists(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == "rllm":
            module = importlib.import_module(str(node.module))
            assert [item.name for item in node.names if not hasattr(module, item.name)] == []


def loaded_by(statement: str) -> set[str]:
    """Return the top-level packages that a statement loads in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "numpy", "openai", "starlette", "uvicorn", "pydantic", "ray"}


@pytest.mark.parametrize(
    "statement",
    ["import rllm", "from rllm import Step, Trajectory, Episode, Action", "import rllm.errors, rllm.registry"],
)
def test_core_import_is_cheap(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


@pytest.mark.parametrize("statement", ["import rllm.store", "import rllm.gateway.server", "import rllm.engine.runner"])
def test_capture_and_rollouts_do_not_import_torch(statement: str) -> None:
    assert not loaded_by(statement) & {"torch", "transformers", "ray"}


def test_serving_does_not_import_openai() -> None:
    assert "openai" not in loaded_by("import rllm.gateway.upstream.policy_server, rllm.engine.capture")


def test_facade_exports_the_names_that_it_lists() -> None:
    for name in rllm.__all__:
        assert getattr(rllm, name) is not None
    assert set(rllm.__all__) <= set(dir(rllm))
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        rllm.Trainer  # noqa: B018


BY_NAME = {
    "_runtime.lazy",
    "compat.import_hook",
    "environments.verifiers_env",
    "registry",
    "rewards.code_harness",
    "sdk.propagation",
    "tracking.trackers",
}
"""Modules that import others by names that a user or a table gives; all other imports are statements, which the layers' check
sees. The harness imports the modules that a test names, in a sandbox."""


def test_imports_by_name_are_known_to_the_layers_check() -> None:
    root = Path(rllm.__path__[0])
    found = {path for path in root.rglob("*.py") for name in _called(path) if name in ("import_module", "__import__")}
    names = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in found}
    assert names == BY_NAME


def _called(path: Path) -> Iterator[str]:
    """Yield the names of the functions that a module calls, if it can import by name."""
    source = path.read_text()
    if "import_module" not in source and "__import__" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", "") or getattr(node.func, "id", "")
