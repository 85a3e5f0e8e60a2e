"""Finding runs, following a running one, and messages about missing ones."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.evaluation.evaluate import Evaluation
from rllm.evaluation.folder import EvaluationFolder
from rllm.evaluation.report import Outcome, report_on
from rllm.store import open_store
from rllm.store.base import SessionInfo
from rllm.store.sqlite import SqliteTraceStore
from rllm.tracking.about import forget_trackers, kept_run_id, seal
from rllm.types import OUTCOME_KEY
from rllm.viewer.rollouts import SORTS, Rollouts
from rllm.viewer.runs import Run, Runs

from .conftest import Client
from .run_folders import large_run, outcome_of, trace_of, write_vocabulary


def test_folder_of_runs_shows_existing_and_new_runs(look: Client, tmp_path: Path) -> None:
    client = look(tmp_path)
    shown = unescape(client.get("/").text)
    assert "There are no runs yet" in shown
    assert "rllm demo" in shown
    large_run(tmp_path / "one", num_episodes=4)
    assert 'href="/run/one"' in client.get("/").text


def test_equal_names_are_kept_apart(tmp_path: Path) -> None:
    folders = [large_run(tmp_path / parent / "run", num_episodes=4) for parent in ("a", "b")]
    runs = Runs([str(folder) for folder in folders])
    assert sorted(run.name for run in runs.all()) == ["run", "run-2"]
    runs.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nix", "no such folder; runs in .*: first; .* such as evals/first; or make one with `rllm demo`"),
        ("docs", "is not the folder of a run.* such as evals/first"),
    ],
)
def test_folder_without_a_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("docs/readme.md", "evals/first/evaluation.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        Runs([str(tmp_path / name)])


def test_store_alone_is_shown_without_metrics(look: Client, tmp_path: Path) -> None:
    folder = large_run(tmp_path / "run", num_episodes=4)
    client = look(folder / "traces.db")
    assert "a trace store without a run" in client.get("/run/traces").text
    assert client.get("/run/traces/episode/s000001").status_code == 200


def test_evaluation_page_shows_its_report(look: Client, tmp_path: Path) -> None:
    folder = large_run(tmp_path / "judged", num_episodes=4)
    for name in ("metrics.jsonl", "config.yaml"):
        (folder / name).unlink(missing_ok=True)
    client = look(folder)
    assert "There are no metrics yet" in client.get("/run/judged").text
    (folder / "report.json").write_text('{"num_tasks": "some"}')  # of another program
    assert "There are no metrics yet" in client.get("/run/judged").text
    outcome = Outcome(task_id="a", index=0, is_correct=True, rewards={"agent": 1.0})
    EvaluationFolder(folder).write_report(report_on([outcome]))
    shown = client.get("/run/judged").text
    assert "An evaluation: accuracy 1 (0.207 to 1), mean reward 1, 1 rollout of 1 task, 0 failed." in shown
    assert "running" not in shown


def test_evaluations_are_compared_side_by_side(look: Client, tmp_path: Path) -> None:
    for name, is_correct in (("before", False), ("after", True)):
        folder = large_run(tmp_path / name, num_episodes=4)
        for file in ("metrics.jsonl", "config.yaml"):
            (folder / file).unlink(missing_ok=True)
        outcome = Outcome(task_id="a", index=0, is_correct=is_correct, rewards={"agent": 0.75 if is_correct else 0.25})
        EvaluationFolder(folder).write_report(report_on([outcome]))
    client = look(tmp_path)
    listed = client.get("/").text
    assert all(f'<td class="n">{number}</td>' in listed for number in ("0", "1", "0.25", "0.75"))
    shown = client.get("/run/after?with=before").text
    assert "after, an evaluation: accuracy 1 (0.207 to 1), mean reward 0.75, 1 rollout of 1 task" in shown
    assert "before, an evaluation: accuracy 0 (0 to 0.793), mean reward 0.25, 1 rollout of 1 task" in shown


def test_evaluation_shows_its_subject_and_the_texts_of_its_tokens(look: Client, tmp_path: Path) -> None:
    pieces = ["<s>", "How", " many", " figs", " Four", "</s>"]
    write_vocabulary(tmp_path / "model", pieces)
    (tmp_path / "model/checkpoints/step-000001/tokenizer.json").rename(tmp_path / "model/tokenizer.json")
    model = f"{tmp_path / 'model'} (files 0123456789abcdef)"
    identity = {"env": "tasks:shell?size=1", "agent": "terminus", "sandbox": "podman", "model": model}
    folder = tmp_path / "evals/first"
    with Evaluation.opened([{"question": "Figs?"}], folder=folder, identity=identity) as opened:
        with open_store(str(folder / "traces.db")) as store:
            for index in range(2):
                about = {"task_id": "figs", "index": index, "split": "eval"}
                trace = trace_of(f"s{index}")
                store.open_session(f"s{index}", {**about, OUTCOME_KEY: outcome_of(trace, advantage=None)}).result(60)
                store.add([trace]).result(60)
        opened.report()
    client = look(tmp_path / "evals")
    listed = client.get("/").text
    assert "<td>tasks:shell?size=1 · terminus · podman</td>" in listed
    assert f'<bdi dir="ltr">{tmp_path / "model"}</bdi>' in listed
    group, tokens = "/run/first/group?task=figs", "/run/first/tokens/s0"
    assert " many figs" in client.get(group).text
    assert "<i> Four</i>" not in client.get(group).text
    assert " Four</i>" in client.get(tokens).text
    assert not any("advantage" in client.get(f"/run/first/{page}").text for page in ("rollouts", "episode/s0"))
    shutil.copytree(folder, tmp_path / "copies/first")  # which another user may have changed
    client = look(tmp_path / "copies")
    shown = client.get(group).text
    assert ("How many figs?" in shown, ">Four<" in shown, "⟨4⟩" in shown) == (True, True, False)
    assert "The tokenizer of the model was not found" in client.get(tokens).text


def test_evaluation_whose_rollouts_all_failed_has_no_result(look: Client, tmp_path: Path) -> None:
    folder = large_run(tmp_path / "judged", num_episodes=4)
    (folder / "metrics.jsonl").unlink()
    EvaluationFolder(folder).write_report(report_on([Outcome(task_id="a", index=0, failure="AgentError: no")]))
    client = look(folder)
    assert "An evaluation: no result, since no rollout was scored; 1 rollout" in client.get("/run/judged").text
    assert '<td class="n">no result</td>' in client.get("/").text


def test_resumed_evaluation_is_shown_as_running(look: Client, tmp_path: Path) -> None:
    tasks = [{"question": "2 + 2?"}]
    client = look(tmp_path)

    def shown() -> str:
        return client.get(f"/run/{tmp_path.name}").text

    for num_rollouts in (1, 2):
        for path in tmp_path.iterdir():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))  # clocks of files are coarse
        with Evaluation.opened(tasks, folder=tmp_path, identity={"agent": "a"}, num_rollouts=num_rollouts) as opened:
            with open_store(str(tmp_path / "traces.db")) as store:
                store.open_session(f"s{num_rollouts}", {"task_id": "t", "split": "eval"}).result(60)
            assert ('class="live"' in shown(), "An evaluation:" in shown()) == (True, num_rollouts == 2)
            opened.report()
        assert ('class="live"' in shown(), "An evaluation:" in shown()) == (False, True)


def test_viewing_a_stopped_run_does_not_make_it_live(look: Client, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("s", {"task_id": "t", "split": "train"}).result(60)
    an_hour_ago = time.time() - 3600
    os.utime(tmp_path / "traces.db", (an_hour_ago, an_hour_ago))
    client = look(tmp_path)
    for page in ("rollouts", ""):
        assert 'class="live"' not in client.get(f"/run/{tmp_path.name}/{page}".rstrip("/")).text


def test_run_before_its_first_rollout_shows_a_message(look: Client, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("num_steps: 3\n")
    client = look(tmp_path)
    assert "There are no metrics yet" in client.get(f"/run/{tmp_path.name}").text
    answer = client.get(f"/run/{tmp_path.name}/rollouts")
    assert answer.status_code == 503
    assert "there are no traces yet" in unescape(answer.text)


def test_new_rollouts_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.viewer.rollouts._FRESH_S", 0.0)
    with open_store(str(tmp_path / "traces.db")) as store:
        rollouts = Rollouts(open_store(str(tmp_path / "traces.db"), read_only=True))
        assert rollouts.all() == []
        store.open_session("one", {"task_id": "t", "split": "train", "training_step": 0}).result(60)
        assert [(item.session_id, item.has_ended) for item in rollouts.all()] == [("one", False)]
        store.open_session("two", {"task_id": "t", "split": "train", "training_step": 0}).result(60)
        store.open_session("one", {OUTCOME_KEY: outcome_of(trace_of("one"))}).result(60)
        assert [(item.session_id, item.has_ended) for item in rollouts.all()] == [("two", False), ("one", True)]
        store.delete("two")
        assert [item.session_id for item in rollouts.all()] == ["one"], "a resumed run has deleted it"


def test_run_in_a_shared_store_shows_its_own_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.viewer.rollouts._FRESH_S", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"store: {tmp_path / 'shared.db'}\n")
    seal(run_dir)
    run_id = kept_run_id(run_dir)
    (run,) = Runs([str(run_dir)]).all()
    with open_store(str(tmp_path / "shared.db")) as store:
        for name, expected in (
            ("own", {"run_id": run_id}),
            ("other", {"run_id": "other", "split": "eval"}),
            ("plain", {}),
        ):
            store.open_session(name, {"task_id": "t", "split": "train", **expected}).result(60)
        assert [item.session_id for item in run.rollouts.all()] == ["plain", "own"]
        assert run.rollouts.choices()["splits"] == ["train"]
        forget_trackers(run_dir)
        store.open_session("anew", {"run_id": kept_run_id(run_dir)}).result(60)
        assert [item.session_id for item in run.rollouts.all()] == ["anew", "plain"], "the run was restarted"
    run.close()


def test_session_started_during_paging_hides_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.viewer.rollouts._PAGE", 2)

    class Growing(SqliteTraceStore):
        def sessions(self, **options: Any) -> list[SessionInfo]:
            page = super().sessions(**options)
            if self.session("new") is None:
                self.open_session("new", {}).result(60)
            return page

    with Growing(tmp_path / "traces.db") as store:
        for number in range(8):
            store.open_session(str(number), {}).result(60)
        rollouts = Rollouts(store)
        assert [item.session_id for item in rollouts.all()] == ["7", "6", "5", "4", "3", "2", "1", "0"]
        monkeypatch.setattr("rllm.viewer.rollouts._FRESH_S", 0.0)
        assert rollouts.all()[0].session_id == "new"


def test_large_store_is_read_in_few_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.viewer.rollouts._PAGE", 2)
    asked: list[tuple[int, int]] = []

    class Counting(SqliteTraceStore):
        def sessions(self, *, limit: int = 100, offset: int = 0, **options: Any) -> list[SessionInfo]:
            asked.append((limit, offset))
            return super().sessions(limit=limit, offset=offset, **options)

    with Counting(tmp_path / "traces.db") as store:
        for number in range(9):
            store.open_session(str(number), {}).result(60)
        assert [item.session_id for item in Rollouts(store).all()] == ["8", "7", "6", "5", "4", "3", "2", "1", "0"]
    assert asked == [(2, 0), (2, 2), (4, 4), (8, 8), (9, 9)]


def test_filter_choices_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.viewer.rollouts._FRESH_S", 0.0)
    with open_store(str(tmp_path / "traces.db")) as store:
        rollouts = Rollouts(store)
        assert not any(rollouts.choices().values())
        outcome = outcome_of(trace_of("one"), name="solver")
        outcome["trajectories"][0]["tools"] = ["search"]
        store.open_session("one", {"split": "train", OUTCOME_KEY: outcome}).result(60)
        rollouts.all()
        found = {"roles": ["solver"], "tools": ["search"], "badges": [], "splits": ["train"]}
        assert rollouts.choices() == found
        store.open_session("two", {"split": "eval"}).result(60)
        rollouts.all()
        assert rollouts.choices() == {**found, "badges": ["running"], "splits": ["eval", "train"]}
        store.open_session("two", {OUTCOME_KEY: outcome_of(trace_of("two"), name="solver")}).result(60)
        rollouts.all()
        assert rollouts.choices() == {**found, "splits": ["eval", "train"]}
        store.delete("two")
        rollouts.all()
        assert rollouts.choices()["splits"] == ["train"], "a resumed run has deleted it"


def test_unusual_session_metadata_is_accepted(look: Client, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session("odd", {"index": "first", "training_step": "last", "split": 7, "task_id": None}).result(60)
    assert "1 in all" in look(tmp_path / "traces.db").get("/run/traces/rollouts").text


FOREIGN = {
    "no object": 3,
    "trajectories not a list": {"trajectories": 3},
    "a trajectory not an object": {"trajectories": [7]},
    "a reward not a number": {"trajectories": [{"reward": "high"}]},
    "tokens not a number": {"trajectories": [{"num_tokens": "many"}]},
    "tools not a list": {"trajectories": [{"tools": 3}]},
    "steps not a list": {"trajectories": [{"steps": 3}]},
    "a step without an id": {"trajectories": [{"steps": [{}]}]},
    "an error as text": {"error": "bad"},
    "warnings not a list": {"warnings": 3},
    "metrics not an object": {"metrics": [1]},
}


@pytest.mark.parametrize("outcome", FOREIGN.values(), ids=FOREIGN)
def test_outcome_in_another_format_is_shown_as_unreadable(look: Client, tmp_path: Path, outcome: object) -> None:
    about = {"task_id": "t@0.0.0", "split": "train", "training_step": 0}
    with open_store(str(tmp_path / "traces.db")) as store:
        for name, ending in (("odd", outcome), ("good", outcome_of(trace_of("good")))):
            store.open_session(name, {**about, OUTCOME_KEY: ending}).result(60)
            store.add([trace_of(name)]).result(60)
    client = look(tmp_path / "traces.db")
    for sort in SORTS:
        assert "2 in all" in client.get("/run/traces/rollouts", params={"sort": sort}).text
    assert "1 found." in client.get("/run/traces/rollouts", params={"badge": "unreadable"}).text
    assert "1 found." in client.get("/run/traces/rollouts", params={"reward": ">0.5"}).text
    for path in ("step/1", "group?task=t@0.0.0", "episode/odd", "tokens/odd"):
        assert client.get(f"/run/traces/{path}").status_code == 200
    assert "cannot be read" in client.get("/run/traces/episode/odd").text


def test_metrics_are_read_again_after_they_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run = Run("run", folder=tmp_path)
    assert list(run.rows()) == []
    path.write_text('{"step":1,"a":1}\n')
    (row,) = run.rows()
    assert run.rows() is run.rows()
    with path.open("a") as file:
        file.write('{"step":1,"b":2}\n')
    assert list(run.rows()) == [{"step": 1, "a": 1, "b": 2}]
    assert row == {"step": 1, "a": 1}


@pytest.mark.parametrize(
    "line",
    [
        '{"step":"2"}',
        '{"step":1e400}',
        '{"step":2,"timing/step_s":"abc","policy/weight_version":"x","rollout/reward":[1]}',
        '{"step":2,"timing/step_s":{},"policy/weight_version":{}}',
        '{"step":2,"timing/step_s":1,"rollout/reward":1.7e308,"eval/reward":-1.7e308}',
        "[1]",
        "\0\0",
    ],
)
def test_damaged_line_of_metrics_does_not_break_pages(look: Client, tmp_path: Path, line: str) -> None:
    folder = large_run(tmp_path / "run", num_episodes=4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{line}\n{{"step":3,"timing/step_s":1}}\n')
    client = look(tmp_path)
    for path in ("/", "/run/run", "/run/run/step/2", "/run/run/pulse.json"):
        assert client.get(path).status_code in (200, 404)
    assert client.get("/run/run/pulse.json").json()["step"] == 3


@pytest.mark.parametrize("config", ["store: {backend: s3}", "store: 7", "store: redis://somewhere/0", "store: null"])
def test_folder_of_another_program_hides_no_run(look: Client, tmp_path: Path, config: str) -> None:
    """A folder that has a `config.yaml`, too."""
    large_run(tmp_path / "run", num_episodes=4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.yaml").write_text(config)
    client = look(tmp_path)
    assert 'href="/run/run"' in client.get("/").text
    assert client.get("/run/other").status_code == 200


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder of a user who is not root, as that user: root may read everything."""
    folder, is_root = Path(tempfile.mkdtemp()), os.geteuid() == 0
    if is_root:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    (folder / "hidden").chmod(0o700)
    shutil.rmtree(folder)


def test_unreadable_folder_hides_no_run(look: Client, shared_folder: Path) -> None:
    for name in ("run", "unread", "hidden"):
        large_run(shared_folder / name, num_episodes=4)
    (shared_folder / "unread/metrics.jsonl").chmod(0)
    (shared_folder / "hidden").chmod(0)
    client = look(shared_folder)
    assert 'href="/run/run"' in client.get("/").text
    assert [client.get(f"/run/{name}").status_code for name in ("run", "unread", "hidden")] == [200, 200, 404]


def test_database_in_use_can_be_read(look: Client, tmp_path: Path) -> None:
    folder = large_run(tmp_path / "run", num_episodes=4)
    writer = sqlite3.connect(folder / "traces.db")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM sessions")
    assert "4 in all" in look(folder).get("/run/run/rollouts").text
    writer.rollback()
    writer.close()


def test_locked_database_shows_a_message(look: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.viewer.runs._TIMEOUT_S", 0.1)
    folder = large_run(tmp_path / "run", num_episodes=4)
    owner = sqlite3.connect(folder / "traces.db")
    owner.execute("PRAGMA locking_mode = EXCLUSIVE")
    owner.execute("BEGIN EXCLUSIVE")
    answer = look(folder).get("/run/run/rollouts")
    owner.rollback()
    owner.close()
    assert answer.status_code == 503
    assert "another process" in unescape(answer.text)


def test_store_of_another_schema_is_rejected(look: Client, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "newer.db")) as newer, newer:
        newer.execute(f"PRAGMA application_id = {0x724C4C4D}")
        newer.execute("PRAGMA user_version = 99")
        newer.execute("CREATE TABLE sessions (id)")
    newer.close()
    answer = look(tmp_path / "newer.db").get("/run/newer/rollouts")
    assert answer.status_code == 503
    assert "has schema 99" in unescape(answer.text)


@pytest.mark.slow
def test_thousands_of_episodes_are_paged(look: Client, tmp_path: Path) -> None:
    client = look(large_run(tmp_path / "large", num_episodes=2_000))
    html = client.get("/run/large/rollouts").text
    assert "2000 in all" in html
    assert html.count("<tr>") == 51
    assert len(html) < 100_000
    assert "s001900" in client.get("/run/large/step/20").text
