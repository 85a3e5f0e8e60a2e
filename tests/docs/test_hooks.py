"""The pages that are generated from code."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from rllm.trainer.config import TrainConfig

from .pages import DOCS, headings


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(hooks: Any) -> dict[str, str]:
    pages: dict[str, str] = hooks.generated_pages()
    return pages


def test_every_section_of_settings_is_documented(pages: dict[str, str]) -> None:
    page = pages["reference/settings.md"]
    for name in TrainConfig.model_fields:
        assert f"`{name}" in page, name


def test_every_environment_variable_is_documented(hooks: Any, pages: dict[str, str]) -> None:
    sources = [path.read_text() for path in (DOCS.parent / "src" / "rllm").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r'"(RLLM_[A-Z_]+[A-Z])"', source)}
    assert read <= hooks.VARIABLES.keys()
    assert [name for name in hooks.VARIABLES if f"| `{name}` |" not in pages["reference/settings.md"]] == []


def test_commands_are_documented_with_options(pages: dict[str, str]) -> None:
    page = pages["reference/commands.md"]
    for text in ("`rllm train`", "`--data`", "`rllm traces list`", "`rllm config`"):
        assert text in page
    assert re.search(r"\| `--seed` \| .+ \| `0` \|", page)
    assert "| `--upstream URL` | " in page
    assert re.search(r"\| `--token` \| .*`\$RLLM_VIEW_TOKEN`", page)
    assert "| `KEY\\|FILE` | Keys, sections" in page


def test_rejection_by_a_backend_is_quoted(hooks: Any) -> None:
    assert hooks.verdict("local", ["algorithm.name=grpo"]) == "yes"
    assert "set backend=verl" in hooks.verdict("local", ["verl.policy_loss=vanilla"])


def test_every_public_name_is_documented(pages: dict[str, str]) -> None:
    page = pages["reference/api.md"]
    assert {"::: rllm.AgentTrainer", "::: rllm.sdk.get_chat_client", "::: rllm.testing.ScriptedEngine"} <= set(
        page.splitlines()
    )


def test_reference_covers_every_package_without_duplicates(hooks: Any, pages: dict[str, str]) -> None:
    page = pages["reference/api.md"]
    found = [line for line in page.splitlines() if line.startswith("::: ")]
    assert len(found) == len(set(found))
    assert "::: rllm.algorithms.base.Algorithm" in found
    assert "`Trajectory`: see [`rllm.Trajectory`][rllm.Trajectory]." in page
    assert "`SessionContext`: see [`rllm.sdk.Session`][rllm.sdk.Session]." in page
    for package in hooks.PACKAGES:
        assert hooks.public_names(importlib.import_module(package)), package


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[them](../reference.md#settings)", "[them](../reference/settings.md)"),
        ("[all](reference.md#algorithms-and-backends), [b](x.md)", "[all](reference/capabilities.md), [b](x.md)"),
        ("[`loop.py`](../src/rllm/trainer/loop.py)", "`loop.py`"),
        ("[code](../../examples/frameworks/openai/agent.py) and [page](gateway.md)", "code and [page](gateway.md)"),
    ],
)
def test_repository_links_become_links_of_the_site(hooks: Any, text: str, shown: str) -> None:
    assert hooks.on_page_markdown(text) == shown


def test_each_generated_page_has_a_section_in_the_repository(hooks: Any, pages: dict[str, str]) -> None:
    assert set(hooks.GENERATED.values()) == pages.keys()
    assert hooks.GENERATED.keys() <= headings(DOCS / "reference.md")
