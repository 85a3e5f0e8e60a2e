from __future__ import annotations

from rllm.sdk.frameworks import hints_for


def test_programs_are_known_by_the_name_of_their_file() -> None:
    (hint,) = hints_for(modules=(), programs=["/usr/local/bin/codex", "python"])
    assert "CODEX_HOME" in hint


def test_what_stands_on_others_is_named_before_them() -> None:
    hints = hints_for(modules={"litellm": None, "crewai": None, "json": None})
    assert [hint.partition(" ")[0].rstrip(":") for hint in hints] == ["CrewAI", "LiteLLM"]


def test_a_process_without_any_framework_gets_no_hint() -> None:
    assert hints_for(modules={"agents": None}) == [], "many a project calls its own package so"
