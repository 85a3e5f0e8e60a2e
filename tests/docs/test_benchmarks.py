"""The table of docs/howto/benchmarks.md is that of the registry."""

from rllm.data.benchmarks import BENCHMARKS

from .pages import DOCS


def row_of(name: str) -> str:
    item = BENCHMARKS[name]
    source = f"`{item.hub_id}`" if item.hub_id else "generated"
    sampling = ", ".join(f"{value:g}" for value in item.sampling.values())
    train = "yes" if "train" in item.splits else ""
    return f"| `{name}` | {item.about.removesuffix('; generated')} | {source} | {item.metric} | {sampling} | {train} |"


def test_table_is_that_of_the_registry() -> None:
    page = (DOCS / "howto" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [row_of(name) for name in BENCHMARKS]
