"""Texts of models, agents and folders are shown as text and nothing else, on every page."""

from __future__ import annotations

import json
import pickle
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rllm.store.sqlite import SqliteTraceStore
from rllm.types import OUTCOME_KEY
from rllm.viewer.export import export_report

from .conftest import Client
from .run_folders import ATTACK, hostile_run, outcome_of, trace_of, write_metrics


class Elements(HTMLParser):
    """Parser of the elements of a page, and of the attributes that could run code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dangerous: list[tuple[str, str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for name, value in attrs:
            is_script = name == "src" and value != "/static/viewer.js"
            if (
                name.startswith("on")
                or name == "style"
                or is_script
                or (value or "").strip().lower().startswith("javascript:")
            ):
                self.dangerous.append((tag, name, value))


KNOWN = set(
    "a article aside b bdi body button circle code dd defs details dialog div dl dt em fieldset figcaption figure form h1 h2 head "
    "header html i input kbd label legend li link main marker meta nav ol option p path pre rect script section select small span "
    "summary svg table tbody td text th thead title tr ul style".split()
)
PAGES = [
    "",
    "/step/1",
    "/rollouts",
    f"/rollouts?{'&'.join(f'{name}={quote(ATTACK)}' for name in ('text', 'role', 'tool', 'error', 'task', 'badge', 'split'))}",
    f"/group?task={quote(ATTACK + '@0.0.0', safe='')}",
    "/episode/bad",
    "/tokens/bad",
    "/tokens/bad?view=table",
    "/tokens/bad?overlay=advantage&call=bad-1",
    "/drift",
    "/drift/bad",
    "/time/1",
    f"/rollouts?sort={quote(ATTACK)}",
    f"/tokens/bad?overlay={quote(ATTACK)}",
    f"/tokens/bad?call={quote(ATTACK)}",
    f"/episode/{quote('<img src=x onerror=hacked=1>')}",
    f"/group?task={quote('<script>hacked=1</script>')}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_run(tmp_path_factory.mktemp("hostile"))


def check(html: str) -> None:
    found = Elements(html)
    assert found.names <= KNOWN
    assert found.dangerous == []
    assert "<img" not in html
    assert "onload=hacked=1>" not in html
    assert "49" not in re.findall(r"\}\}(.{2})", html), "expressions in texts are not evaluated"


@pytest.mark.parametrize("path", PAGES)
def test_attack_is_shown_as_text(look: Client, folder: Path, path: str) -> None:
    client = look(folder)
    answer = client.get(f"/run/{quote(folder.name)}{path}")
    assert answer.status_code in (200, 400, 404)
    check(answer.text)
    assert escape("<script>window.hacked = 1", quote=False) in answer.text or "&lt;" in answer.text


def test_every_text_of_an_episode_is_shown(look: Client, folder: Path) -> None:
    html = look(folder).get(f"/run/{quote(folder.name)}/episode/bad").text
    assert html.count("&lt;script&gt;window.hacked = 1&lt;/script&gt;") >= 12


def test_home_page_shows_names_as_text(look: Client, folder: Path) -> None:
    check(look(folder).get("/").text)


def test_attack_in_a_report_is_shown_as_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    export_report(str(folder), path)
    html = path.read_text()
    check(html)
    assert "<script" not in html
    assert "default-src &#39;none&#39;" in html


def test_unpaired_surrogate_is_shown_as_its_escape(look: Client, tmp_path: Path) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "say\ud83d", "arguments": json.dumps({"x": "\ud83d" * 20})},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    write_metrics(folder, 1)
    with SqliteTraceStore(folder / "traces.db") as store:
        trace = trace_of("half", response={"role": "assistant", "content": "\ud83d", "tool_calls": [call]})
        outcome = outcome_of(trace, name="\ud83d", warnings=["\ud83d"])
        about = {"task_id": "half@0.0.0", "split": "train", "training_step": 0, OUTCOME_KEY: outcome}
        store.open_session("half", about).result(60)
        store.add([trace]).result(60)
    client = look(folder)
    for path in ("", "/step/1", "/rollouts", "/episode/half", "/tokens/half", "/tokens/half/data.json"):
        assert client.get(f"/run/run{path}").status_code == 200
    assert "say\\ud83d" in client.get("/run/run/episode/half").text
    assert export_report(str(folder), tmp_path / "report.html") == 1


def test_json_is_not_sniffed_as_html(look: Client, folder: Path) -> None:
    answer = look(folder).get(f"/run/{quote(folder.name)}/tokens/bad/data.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_content_of_a_run_is_never_executed(look: Client, tmp_path: Path) -> None:
    made = tmp_path / "made"
    attack = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{made}]]"
    (tmp_path / "config.yaml").write_text(f"model: {attack}\n")
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches/step-000001.json").write_bytes(pickle.dumps(Touch(made)))
    client = look(tmp_path)
    assert client.get(f"/run/{tmp_path.name}").status_code == 200
    answer = client.get(f"/run/{tmp_path.name}/batch/1")
    assert (answer.status_code, "is not a batch of this version" in answer.text) == (503, True)
    assert not made.exists()


class Touch:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
