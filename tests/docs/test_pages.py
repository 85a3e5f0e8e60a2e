"""Every page of the documentation runs unchanged except for the model and the number of steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .pages import (
    DOCS,
    MARKDOWN,
    MODELS,
    ROOT,
    Fence,
    commands,
    fences,
    headings,
    is_in_clone,
    links,
    on_small_machine,
)

FOLDERS = ("tutorials", "concepts", "howto")
"""Pages in other folders are tested next to their code."""
PAGES = [
    DOCS / "index.md",
    DOCS / "environments.md",
    *(page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md"))),
]
READ_ONLY = {"pip", "make", "cd", "export", "source", "curl", "ray", "docker", "kubectl"}
LANGUAGES = {"python", "sh", "json", "jsonl", "yaml", "text"}


@pytest.mark.docs
# Agents of pages have clients of their own, which are left to the garbage collector, as users leave them.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_page_runs(page: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for fence in fences(page):
        assert fence.language in LANGUAGES, f"{page.name}, {fence.name}: use one of {', '.join(sorted(LANGUAGES))}"
        if fence.title:
            Path(fence.title).parent.mkdir(parents=True, exist_ok=True)
            Path(fence.title).write_text(fence.text, encoding="utf-8")
        elif fence.language == "python":
            code = MODELS.sub(str(policy), fence.text)
            exec(compile("\n" * fence.line + code, str(page), "exec"), names)
        elif fence.language == "sh":
            run(fence, policy)


def run(fence: Fence, policy: Path) -> None:
    for words in commands(fence):
        if words[0] in READ_ONLY:
            continue
        assert words[0] in ("rllm", "python"), f"{fence.name}: {words[0]}"
        program, *arguments = on_small_machine(words, policy)
        command = [sys.executable, "-m", "rllm"] if program == "rllm" else [sys.executable]
        environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=600, env=environment, check=False
        )
        assert done.returncode == 0, f"{fence.name}: {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_documented_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text())) | set(
        re.findall(r"^make ([a-z-]+)", page.read_text(), re.MULTILINE)
    )
    assert named <= targets


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not is_in_clone(target) or (heading and target.suffix == ".md" and heading not in headings(target)):
            broken.append(link)
    assert broken == []


def test_pages_named_in_the_code_exist() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"docs/[\w/-]+\.md", source)}
    assert [name for name in sorted(named) if not is_in_clone(ROOT / name)] == []


def test_every_page_is_in_the_navigation() -> None:
    """Find what mkdocs would warn of, without mkdocs; it finds the frameworks' pages by itself."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"([\w/\-]+\.md)", navigation)) - {"frameworks/index.md"}
    generated = {"reference/settings.md", "reference/commands.md", "reference/capabilities.md", "reference/api.md"}
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "frameworks"}
    assert written - listed == set()
    assert listed - written == generated


def test_pages_install_this_project_and_not_the_one_on_pypi() -> None:
    places = ("*.md", "docs/**/*.md", "examples/**/*.md", "examples/**/Dockerfile")
    found = {
        (path.name, command)
        for place in places
        for path in ROOT.glob(place)
        for command in re.findall(r"pip install [^`\n]*\brllm\b[^`\n]*", path.read_text(encoding="utf-8"))
        if " @ " not in command
    }
    assert found == {("README.md", "pip install rllm"), ("index.md", "pip install 'rllm[math]'")}, (
        "both explain the name"
    )
