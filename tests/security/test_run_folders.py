"""An attacker writes a run folder: it may name nothing outside of itself, and reading it stays cheap."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rllm.cli.options import RunOptions
from rllm.cli.training import begun_as
from rllm.engine.episode_log import EpisodeLog, read_tasks
from rllm.errors import ConfigError, StoreError
from rllm.evaluation.folder import EvaluationFolder, compare
from rllm.store import open_store
from rllm.tracking.about import check_contained, is_own, run_id_of, seal, store_of_run
from rllm.trainer.agent_sft_trainer import AgentSFTTrainer
from rllm.trainer.config import load_config
from rllm.trainer.episode_records import stored_episodes
from rllm.trainer.export import chosen_checkpoint, export_model
from rllm.viewer.runs import Runs

OUTSIDE = ["postgresql://attacker.example/db", "sqlite:////srv/other.db", "../other.db", "/srv/other.db"]


def run_naming(folder: Path, store: str) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"store: {store}\n")
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    return run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stores that are opened."""
    tried: list[str] = []

    def refuse(url: str, **options: Any) -> None:
        tried.append(url)
        raise StoreError("opened")

    for module in ("rllm.viewer.runs", "rllm.trainer.episode_records", "rllm.trainer.agent_sft_trainer", "rllm.store"):
        monkeypatch.setattr(f"{module}.open_store", refuse)
    return tried


@pytest.mark.parametrize("store", OUTSIDE)
def test_readers_do_not_open_a_store_outside_of_the_folder(tmp_path: Path, opened: list[str], store: str) -> None:
    run = run_naming(tmp_path, store)
    (viewed,) = Runs([str(run)]).all()
    readers = [
        lambda: viewed.store,
        lambda: store_of_run(run),
        lambda: list(stored_episodes(run)),
        lambda: AgentSFTTrainer(train_dataset=str(run), config=["model.path=x"]),
    ]
    for read in readers:
        with pytest.raises(ConfigError, match="RLLM_TRUSTED_RUNS"):
            read()
    assert opened == []


@pytest.mark.parametrize("command", ["explain", "rescore", "export", "sft", "view"])
def test_commands_reject_a_store_outside_of_the_folder(
    tmp_path: Path, opened: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from rllm import cli

    run = run_naming(tmp_path, OUTSIDE[0])
    (tmp_path / "r.py").write_text("def reward(task, answer):\n    return 1.0\n")
    more = {
        "rescore": ["--reward", f"{tmp_path}/r.py:reward"],
        "export": ["--chat", f"{tmp_path}/out.jsonl"],
        "sft": ["--model", "x"],
        "view": ["--export", f"{tmp_path}/out.html"],
    }
    monkeypatch.setattr("sys.argv", ["rllm", command, str(run), *more.get(command, [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "RLLM_TRUSTED_RUNS" in capsys.readouterr().err
    assert opened == []


@pytest.mark.parametrize(
    "name",
    ["traces.db", "episodes.jsonl", "tasks.jsonl", "checkpoints/step-000001", "checkpoints/step-000002/tokenizer.json"],
)
def test_links_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("seed: 1\n")
    with open_store(str(tmp_path / "private.db")) as store:
        store.open_session("secret", {}).result(60)
    (run / name).symlink_to(tmp_path / "private.db")
    for read in (lambda: Runs([str(run)]).all(), lambda: list(stored_episodes(run)), lambda: check_contained(run)):
        with pytest.raises(ConfigError, match="is a link out of the folder"):
            read()
    with pytest.raises(ConfigError, match="is a link out of the folder"):
        chosen_checkpoint(run, "latest")


def test_export_copies_no_file_of_this_machine(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"step": 1}')
    (tmp_path / "secret").write_text("secret")
    (checkpoint / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="is a link out of the folder"):
        export_model(chosen_checkpoint(tmp_path / "run", "latest"), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", ["traces.db", "episodes.jsonl", "batches/step-000001.json"])
def test_named_pipe_does_not_block_readers(tmp_path: Path, name: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    for read in (lambda: Runs([str(tmp_path)]).all(), lambda: list(stored_episodes(tmp_path))):
        with pytest.raises(ConfigError, match="is a pipe or a device"):
            read()


def test_circular_links_are_reported_or_harmless(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")
    (tmp_path / "more").symlink_to(tmp_path)
    check_contained(tmp_path)


@pytest.mark.parametrize("name", [".lock", "episodes.jsonl", "report.json", "evaluation.json"])
def test_evaluation_does_not_write_through_links_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="is a link out of the folder"), EvaluationFolder(folder).claimed({}):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("report", "identity"),
    [
        ("[" * 100_000, "{}"),
        ('{"tasks": [{"task_id": "a", "accuracy": "x", "mean_reward": null}]}', "{}"),
        ('{"tasks": [{"task_id": "a", "accuracy": 1, "mean_reward": 1}]}', "[1]"),
        ('{"tasks": [{"task_id": [], "accuracy": 1, "mean_reward": 1}]}', "{}"),
        ('{"tasks": 5}', "{}"),
        ("[]", "{}"),
    ],
)
def test_reports_in_another_format_are_rejected(tmp_path: Path, report: str, identity: str) -> None:
    (tmp_path / "report.json").write_text(report)
    (tmp_path / "evaluation.json").write_text(identity)
    with pytest.raises(ConfigError, match="--compare"):
        compare(tmp_path, tmp_path)


@pytest.mark.parametrize("sign", ["\x1b]0;owned\a", "\x1b[2J", "\x9b2J", "\u202e", "\u2066"])
def test_control_characters_in_errors_are_escaped(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    from rllm import cli

    with open_store(str(tmp_path / "traces.db")) as store:
        store.open_session(f"planted{sign}", {}).result(60)
    monkeypatch.setattr("sys.argv", ["rllm", "traces", "show", "another", "--store", str(tmp_path / "traces.db")])
    with pytest.raises(SystemExit):
        cli.main()
    printed = "".join(capsys.readouterr())
    assert "planted" in printed
    assert sign[0] not in printed


def test_hostile_folder_does_not_hide_others(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "runs" / "bad" / "traces.db").symlink_to("/etc/hostname")
    assert [run.name for run in Runs([str(tmp_path / "runs")]).all()] == ["good"]


def test_adapter_cannot_name_a_folder_of_this_machine(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"step": 1}')
    for base, allowed in (("/srv/private-model", False), ("../../private", False), ("Qwen/Qwen3-0.6B", True)):
        (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        if allowed:
            assert chosen_checkpoint(tmp_path / "run", "latest") == checkpoint
        else:
            with pytest.raises(ConfigError, match="RLLM_TRUSTED_RUNS"):
                chosen_checkpoint(tmp_path / "run", "latest")


def test_run_of_another_user_is_not_resumed_and_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: {name: 'evil:Algorithm'}\n")
    (run / "begun_as.yaml").write_text("command: train\nagent: evil.py:agent\ndata: tasks.jsonl\n")
    for forged in (None, "", "0" * 64, "é"):
        if forged is not None:
            (run / ".seal").write_text(forged)
        with pytest.raises(ConfigError, match="you did not begin this run here"):
            begun_as("train", RunOptions(resume=run))
    seal(run)
    assert begun_as("train", RunOptions(resume=run))["agent"] == "evil.py:agent"
    for name in ("config.yaml", "begun_as.yaml"):
        content = (run / name).read_text()
        (run / name).write_text(f"{content}# changed\n")
        assert not is_own(run)
        (run / name).write_text(content)
    shutil.copytree(run, tmp_path / "copy")  # another user may send it back with other checkpoints
    assert not is_own(tmp_path / "copy")
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "another user"))
    assert not is_own(run)
    monkeypatch.setenv("RLLM_TRUSTED_RUNS", f"/nowhere:{tmp_path}")
    assert is_own(run)


def test_key_is_not_readable_by_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir()
    seal(tmp_path / "run")
    (key,) = (tmp_path / "home").iterdir()
    assert key.stat().st_mode & 0o077 == 0
    assert is_own(tmp_path / "run")


BOMB = "\n".join(
    [
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)),
    ]
)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "a: &a {b: {c: *a}}", f"a: {'[' * 500}{']' * 500}"])
def test_yaml_aliases_do_not_multiply(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(run / "config.yaml")
    (viewed,) = Runs([str(run)]).all()
    assert viewed.config == {}


def test_oversized_settings_file_is_not_read_completely(tmp_path: Path) -> None:
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(10_000_000_000)
    with pytest.raises(ConfigError, match="more than 4,000,000 bytes"):
        load_config(tmp_path / "config.yaml")


def test_endless_lines_are_not_read_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm._runtime.files.MAX_LINE_BYTES", 1_000_000)
    for name in ("tasks.jsonl", "episodes.jsonl", "metrics.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10_000_000_000)
    with pytest.raises(ConfigError, match=r"tasks\.jsonl has a line of more than"):
        read_tasks(tmp_path)
    with pytest.raises(ConfigError, match=r"episodes\.jsonl has a line of more than"):
        list(EpisodeLog.read(tmp_path / "episodes.jsonl"))
    (viewed,) = Runs([str(tmp_path)]).all()
    assert viewed.rows() == []


def test_oversized_files_are_not_read_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    for path in (tmp_path / "report.json", tmp_path / ".store-id", checkpoint / "tokenizer.json"):
        with path.open("wb") as file:
            file.truncate(1_000_000_000_000)  # more than any machine's memory
    (viewed,) = Runs([str(tmp_path)]).all()
    assert viewed.evaluated is None
    assert viewed.vocabulary.decode([1]) == "?"
    assert len(run_id_of(tmp_path) or "") < 10_000


@pytest.mark.parametrize("line", ['{"split": ["x"], "task_id": 1, "task": 2}', "5", "[]", "[" * 100_000, "{}"])
def test_invalid_task_line_is_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(f"{line}\n")
    with pytest.raises(StoreError, match=r"tasks\.jsonl, line 1 is not a task"):
        read_tasks(tmp_path)


@pytest.mark.parametrize("report", [b'{"x":' + b"[" * 100_000, b'{"num_tasks": "\xff"}', b"5"])
def test_report_in_another_format_does_not_hide_the_run(tmp_path: Path, report: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "report.json").write_bytes(report)
    (viewed,) = Runs([str(tmp_path)]).all()
    assert viewed.evaluated is None


def test_line_of_millions_of_lists_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_bytes(b'{"task":[' + b"[]," * 4_000_000 + b"1]}\n")
    with pytest.raises(StoreError, match=r"episodes\.jsonl, line 1 is not an episode"):
        list(EpisodeLog.read(tmp_path / "episodes.jsonl"))


@pytest.mark.parametrize(
    "tagged",
    [
        "!!python/object/apply:os.system ['touch planted']",
        "!!python/object/new:subprocess.Popen [['touch', 'planted']]",
        "!!python/name:os.system ''",
        "!!python/module:os ''",
    ],
)
def test_yaml_tags_create_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tagged: str) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_naming(tmp_path, tagged)
    with pytest.raises(ConfigError):
        load_config([f"seed={tagged}"])
    with pytest.raises(ConfigError):
        load_config(run / "config.yaml")
    with suppress(ConfigError):
        _ = Runs([str(run)]).all()[0].store
    assert not (tmp_path / "planted").exists()
