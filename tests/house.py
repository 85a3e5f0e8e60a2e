"""Size and language of the source, as numbers: `python tests/house.py` prints them beside their targets."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ODD_WORDS = re.compile(
    r"\b(tell|tells|told|say|says|said|whom|whoever|likewise|anew|nobody|somebody|hears?|heard|go(?:es|ing|ne)? on)\b",
    re.IGNORECASE,
)
"""Words that read oddly in documentation: use "log", "report", "return", "raise" and the like."""
FIRST_WORDS = re.compile(r"(What|Whether|How|Where|Who|Whom|Which|Why|Whatever)\b")
"""Words that no docstring begins with: a function's begins with a verb, that of a class or module with a noun phrase."""
_HAVE_PROMPTS = ("tasks.py", "llm_judge.py")
"""Modules with texts for models."""
MAX_COLUMNS = 120
MAX_ANY = 15.0
"""Uses of `Any` per 1,000 lines of code."""
_TEMPLATE = "new_project"
"""Folder of the files that `rllm init` copies, which are not modules of the package."""


@dataclass
class House:
    """Source files of the project, and counts over them."""

    root: Path = ROOT
    texts: dict[Path, str] = field(init=False)

    def __post_init__(self) -> None:
        found = sorted(path for path in self.source.rglob("*.py") if _TEMPLATE not in path.parts)
        self.texts = {path: path.read_text(encoding="utf-8") for path in found}

    @property
    def source(self) -> Path:
        return self.root / "src" / "rllm"

    @property
    def num_lines(self) -> int:
        """Lines of all modules, and of the compiled reader where there is one."""
        native = [path for path in (self.root / "native").rglob("*") if path.suffix in (".pyx", ".pxi")]
        return sum(self.lines_in("").values()) + sum(path.read_text().count("\n") for path in native)

    def lines_in(self, package: str) -> dict[Path, int]:
        """Return the number of lines of each file of a package; of every package for the empty name."""
        folder = self.source / package
        return {path: text.count("\n") for path, text in self.texts.items() if folder in path.parents}

    def packages(self) -> list[str]:
        """Return the names of the packages directly below `rllm`."""
        names = (path.relative_to(self.source).parts for path in self.texts)
        return sorted({parts[0] for parts in names if len(parts) > 1})

    def package_of(self, path: Path) -> str:
        """Return the name of a file's package, or of the module itself if it is directly below `rllm`."""
        return path.relative_to(self.source).parts[0].removesuffix(".py")

    @cached_property
    def root_modules(self) -> list[Path]:
        special = ("__init__.py", "__main__.py")
        return [path for path in self.texts if path.parent == self.source and path.name not in special]

    @property
    def any_per_1000(self) -> float:
        num_lines = sum(bool(line.strip()) for text in self.texts.values() for line in text.splitlines())
        return 1000 * sum(len(re.findall(r"\bAny\b", text)) for text in self.texts.values()) / max(num_lines, 1)

    def long_lines(self) -> Iterator[str]:
        """Yield `file:line` of each line that is too long."""
        for path, text in self.texts.items():
            for number, line in enumerate(text.splitlines(), start=1):
                if len(line) > MAX_COLUMNS:
                    yield f"{path.relative_to(self.root)}:{number}"

    @cached_property
    def tests(self) -> dict[Path, str]:
        """Tests, examples and benchmarks, of which only the language is checked."""
        found = sorted(
            path for name in ("tests", "examples", "benchmarks") for path in (self.root / name).rglob("*.py")
        )
        return {path: path.read_text(encoding="utf-8") for path in found}

    def odd_words(self, texts: dict[Path, str] | None = None) -> Iterator[tuple[Path, str]]:
        """Yield each odd word in a docstring, a comment or a test's name: its file, and `file:line: word`."""
        for path, text in (self.texts if texts is None else texts).items():
            for number, comment in prose_of(text):
                for found in ODD_WORDS.finditer(comment):
                    line = number + comment[: found.start()].count("\n")
                    yield path, f"{path.relative_to(self.root)}:{line}: {found[0]}"

    def odd_messages(self) -> Iterator[str]:
        """Yield `file:line: word` of each odd word in a text of the source that is not a prompt."""
        for path, text in self.texts.items():
            for node in ast.walk(ast.parse(text)) if path.name not in _HAVE_PROMPTS else ():
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                    for found in ODD_WORDS.finditer(node.value):
                        yield f"{path.relative_to(self.root)}:{node.lineno}: {found[0]}"

    def missing_from_maps(self) -> Iterator[str]:
        """Yield each module that the docstring of its package does not name."""
        for path in self.texts:
            init = path.parent / "__init__.py"
            if path.stem in ("__init__", "__main__") or path.parent == self.source or init not in self.texts:
                continue
            if path.stem not in (ast.get_docstring(ast.parse(self.texts[init])) or ""):
                yield str(path.relative_to(self.root))

    @cached_property
    def num_words(self) -> int:
        return sum(len(comment.split()) for text in self.texts.values() for _, comment in prose_of(text))

    def odd_beginnings(self, texts: dict[Path, str] | None = None) -> Iterator[tuple[Path, str]]:
        """Yield each docstring that begins with a question word: its file, and `file: beginning`."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for path, text in (self.texts if texts is None else texts).items():
            for node in ast.walk(ast.parse(text)):
                doc = ast.get_docstring(node) if isinstance(node, kinds) else None
                if doc and FIRST_WORDS.match(doc):
                    yield path, f"{path.relative_to(self.root)}: {doc[:60]!r}"


def prose_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, comments and names of tests of a module, each with its first line's number."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _rows(house: House) -> Iterator[tuple[str, float, float | None]]:
    """Yield the name of each number, its value, and its target."""
    count = {name: len(house.lines_in(name)) for name in house.packages()}
    num_odd = sum(1 for _ in house.odd_words())
    yield "files in src/rllm", len(house.texts), 300
    yield "lines in src/ and native/", house.num_lines, 52_000
    yield "gateway/ files", count.get("gateway", 0), 32
    yield "gateway/ lines", sum(house.lines_in("gateway").values()), 6_500
    for name, most in {"trainer": 35, "engine": 18, "inference": 24, "cli": 18}.items():
        yield f"{name}/ files", count.get(name, 0), most
    yield "modules at the root", len(house.root_modules), 6
    yield "Any per 1,000 lines", round(house.any_per_1000, 1), MAX_ANY
    yield f"lines over {MAX_COLUMNS} columns", sum(1 for _ in house.long_lines()), 0
    yield "docstrings with What, Whether, ...", sum(1 for _ in house.odd_beginnings()), 0
    yield "odd words per 1,000", round(1000 * num_odd / max(house.num_words, 1), 2), 0.5


def main() -> None:
    """Print the numbers with their targets, then files and lines of each package."""
    house = House(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    print(f"{'':<36}{'today':>10}{'at most':>10}")
    for name, value, most in _rows(house):
        mark = "" if most is None or value <= most else "  *"
        print(f"{name:<36}{value:>10,}{most if most is not None else '':>10,}{mark}")
    odd = Counter(house.package_of(path) for path, _ in (*house.odd_words(), *house.odd_beginnings()))
    print(f"\n{'package':<36}{'files':>10}{'lines':>10}{'odd':>10}")
    for name in house.packages():
        lines = house.lines_in(name)
        print(f"{name:<36}{len(lines):>10,}{sum(lines.values()):>10,}{odd[name] or '':>10}")


if __name__ == "__main__":
    main()
