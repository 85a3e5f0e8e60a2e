"""The tables of docs/models.md, made of what the tests of this folder prove.

python -m tests.models.table
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .architectures import ARCHITECTURES, Architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def architectures() -> str:
    """Return the table of architectures: those of one kind that are sampled and trained alike share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in ARCHITECTURES.values():
        rows.setdefault((each.kind, *_ways(each)), []).append(f"`{each.model_type}`{each.name[len(each.model_type) :]}")
    head = ["layers", "architectures (`model_type`)", "loads and samples here", "trains here", "with LoRA"]
    return _table(head, [[kind, ", ".join(names), *ways] for (kind, *ways), names in rows.items()])


def _ways(each: Architecture) -> list[str]:
    if each.is_refused:
        return ["refused: needs `mamba-ssm`, and so CUDA"] + ["no"] * 2
    sampled = "together, prefixes shared" if each.is_batched else "one by one"
    return [sampled, "as a prefix tree" if each.is_tree else "one sequence at a time", "yes"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["--"] * len(head), *rows])


TABLES = {"architectures": architectures}


def with_tables(page: str) -> str:
    """Return the page with each table between its marks."""
    for name, table in TABLES.items():
        begin, end = (f"<!-- {word} of {name} -->\n" for word in ("begin", "end"))
        page = re.sub(f"(?<={begin}).*(?={end})", lambda _, table=table: table(), page, flags=re.DOTALL)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
