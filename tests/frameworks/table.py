"""The table of docs/frameworks/index.md, made of the results of the tests of each framework.

python tests/frameworks/table.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "frameworks"
RESULTS = DOCS / "results"
BEGIN, END = "<!-- begin of results -->\n", "<!-- end of results -->\n"
HEAD = (
    "framework",
    "used as",
    "endpoint",
    "streams",
    "calls",
    "sequences, plain answers",
    "sequences, with reasoning",
    "notes",
)


def read_rows(framework: str) -> list[dict[str, Any]]:
    """Return the results for a framework, a row for each variant."""
    path = RESULTS / f"{framework}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def write_rows(framework: str, package: str, version: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {"framework": framework, "package": package, "version": version, "rows": rows}
    (RESULTS / f"{framework}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def table() -> str:
    """Return all results as a Markdown table."""
    lines = [_line(HEAD), _line(["--"] * len(HEAD))]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        named = f"[{result['package']}]({result['framework']}.md) {result['version'] or 'not installed'}"
        lines += [_line([named, *_cells(row)]) for row in result["rows"]]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    head = [f"`{row['way']}`", row["endpoint"], "yes" if row["streaming"] else ""]
    if "failed" in row:
        return [*head, "", "", "", f"🔴 {row['failed']}"]
    calls = f"{row['calls']}" + (f" + {row['side_calls']} side" if row["side_calls"] else "")
    return [*head, calls, _sequences(row.get("plain")), _sequences(row.get("thinking")), row["notes"]]


def _sequences(measured: Mapping[str, Any] | None) -> str:
    """Return the number of sequences without continuation and with it, and why the prompts drift."""
    if measured is None:
        return ""
    before, after = measured["sequences_without"], measured["sequences"]
    why = f" ({', '.join(measured['drift_without'])})" if measured["drift_without"] else ""
    left = f" ({', '.join(measured['drift'])})" if measured["drift"] else ""
    return f"{after}{left}" if before == after else f"{before}{why} → **{after}**{left}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def with_table(page: str) -> str:
    """Return the page with the table of the results between its marks."""
    return re.sub(f"(?<={BEGIN}).*(?={END})", lambda _: table(), page, flags=re.DOTALL)


if __name__ == "__main__":
    index = DOCS / "index.md"
    index.write_text(with_table(index.read_text()))
