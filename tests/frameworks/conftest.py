"""One engine for all tests of a process, and a file of results for each framework, written by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .forced_engine import ForcedEngine
from .proof import Variant, prove
from .rollouts import ROOT, Framework
from .table import read_rows, write_rows

FAILURE_CHARACTERS = 200


@pytest.fixture(scope="session")
def engine() -> Iterator[ForcedEngine]:
    engine = ForcedEngine(lambda prompt: "")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Results for the module's `FRAMEWORK`, by variant; variants that were not run keep their earlier result."""
    framework: Framework = request.module.FRAMEWORK
    rows: dict[str, Any] = {}
    yield rows
    rows = {row["way"]: row for row in read_rows(framework.name)} | rows
    ways = [variant.way for variant in request.module.VARIANTS]
    write_rows(framework.name, framework.package, framework.version, [rows[way] for way in ways if way in rows])


@pytest.fixture
def proven(engine: ForcedEngine, rows: dict[str, Any]) -> Callable[[Framework, Variant], None]:
    """Run a variant, and write down its result; a failure becomes a red row."""

    def run(framework: Framework, variant: Variant) -> None:
        try:
            rows[variant.way] = prove(framework, variant, engine)
        except Exception as error:
            rows[variant.way] = {**variant.described, "failed": _reason(error)}
            raise

    return run


def _reason(error: Exception) -> str:
    """Return the last line of Python's error, without the additions of pytest."""
    answer = str(error).partition("\nassert ")[0].strip() or type(error).__name__
    return answer.splitlines()[-1].strip().replace(f"{ROOT}/", "")[:FAILURE_CHARACTERS]
