"""Task folders are parsed as in Harbor; errors and ignored fields are reported."""

import json
import logging
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.sandbox.base import ImageSource, SandboxLimits
from rllm.tasks.folder import read_task, read_tasks

from .conftest import EXAMPLES, write_task

READINGS = json.loads(Path(__file__).with_name("harbor_readings.json").read_text())
DEFAULTS = {"agent_timeout_s": 600.0, "cpus": 1.0, "memory_mb": 2048, "disk_mb": 2048}
"""Our values of fields for which Harbor has no default."""


def test_task_has_the_fields_of_its_folder(task_folder):
    folder = task_folder({"task.toml": '[metadata]\nlevel = "easy"\n[environment]\ncpus = 2\nstorage_mb = 10\n'})
    task = read_task(folder)
    assert (task.name, task.instruction) == ("task", "Write the word yes to the file done.\n")
    assert task.image == ImageSource(folder=folder / "environment")
    assert task.limits == SandboxLimits(cpus=2, disk_mb=10)
    assert task.metadata == {"level": "easy"}
    assert (task.tests, task.solution) == (folder / "tests", folder / "solution")


@pytest.mark.parametrize("reading", READINGS["toml"], ids=lambda reading: reading["text"][:40] or "empty")
def test_task_toml_is_parsed_as_in_harbor(task_folder, reading):
    folder = task_folder({"task.toml": reading["text"]})
    if reading["read"] is None:
        with pytest.raises(ConfigError, match=r"task\.toml"):
            read_task(folder)
        return
    task, theirs = read_task(folder), dict(reading["read"])
    for name, value in DEFAULTS.items():
        theirs[name] = value if theirs[name] is None else theirs[name]
    name, image, artifacts = theirs.pop("name"), theirs.pop("image"), theirs.pop("artifacts")
    limits = {key: theirs.pop(key) for key in ("cpus", "memory_mb", "disk_mb")}
    assert {key: getattr(task, key) for key in theirs} == theirs
    assert task.limits == SandboxLimits(**limits)
    assert task.name == (name or "task")
    assert task.image.name == image
    assert [path for path in task.artifacts if path != "/logs/artifacts"] == artifacts


@pytest.mark.parametrize("reading", READINGS["instructions"], ids=lambda reading: repr(reading["text"]))
def test_benchmark_canaries_are_removed_from_instructions(task_folder, reading):
    read = read_task(task_folder({"instruction.md": reading["text"]})).instruction
    assert read.strip() == reading["read"].strip()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"task.toml": None}, r"task\.toml is missing"),
        ({"instruction.md": None}, r"instruction\.md is missing"),
        ({"tests/test.sh": None}, r"tests/test\.sh is missing"),
        ({"tests/test.sh": "#!/bin/sh\r\nexit 0\r\n"}, r"tests/test\.sh.*Windows"),
        ({"environment/Dockerfile": None}, "Dockerfile.*docker_image"),
        ({"instruction.md": " \n"}, r"instruction\.md is empty"),
        ({"environment/docker-compose.yaml": "services: {}"}, r"docker-compose\.yaml.*several containers"),
        ({"task.toml": 'version = "2.0"'}, r"schema_version='2\.0'.*1\.4"),
        ({"task.toml": "[agent]\ntimeout_sec = -1"}, r"agent\.timeout_sec=-1"),
        ({"task.toml": "[verifier]\ntimeout_sec = nan"}, r"verifier\.timeout_sec=nan"),
        ({"task.toml": "[environment]\ngpus = 1"}, r"environment\.gpus=1"),
        ({"task.toml": '[[steps]]\nname = "one"'}, r"steps=.*several steps"),
        ({"task.toml": '[verifier]\nenvironment_mode = "shared"'}, "shared.*artifacts"),
        ({"task.toml": '[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }'}, r"verifier\.env\.KEY"),
        ({"task.toml": '[agent]\nuser = "ada"'}, r"agent\.user='ada'"),
        ({"task.toml": 'artifacts = ["/tests"]'}, "artifacts='/tests'"),
        ({"task.toml": '[environment]\nworkdir = "app"'}, "environment.workdir='app'"),
        ({"task.toml": 'artifacts = ["/logs/verifier/reward.txt"]'}, "verifier's own files"),
    ],
)
def test_errors_name_the_mistake(task_folder, files, named):
    with pytest.raises(ConfigError, match=named):
        read_task(task_folder(files))


def test_fields_without_effect_are_reported_once(task_folder, caplog):
    folder = task_folder({"task.toml": "[agent]\ntimeout = 5\n[environment]\nallow_internet = true\n"})
    with caplog.at_level(logging.WARNING):
        read_task(folder)
        read_task(folder)
    assert len(caplog.records) == 2
    assert "did you mean 'timeout_sec'" in caplog.text
    assert "allow_internet" in caplog.text


def test_links_out_of_the_folder_are_rejected(task_folder):
    folder = task_folder()
    (folder / "tests" / "inside").symlink_to("test.sh")
    read_task(folder)
    (folder / "tests" / "outside").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="tests/outside"):
        read_task(folder)


def test_folder_of_tasks_is_read_in_order_of_names(tmp_path):
    write_task(tmp_path / "b")
    write_task(tmp_path / "a")
    (tmp_path / "README.md").write_text("Tasks.")
    (tmp_path / "tools").mkdir()
    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b"]
    assert [task.name for task in read_tasks(tmp_path / "a")] == ["a"]


def test_all_problems_of_a_folder_are_reported(tmp_path):
    write_task(tmp_path / "a", {"tests/test.sh": None})
    write_task(tmp_path / "b", {"task.toml": "x"})
    write_task(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"(?s)a/tests/test\.sh.*b/task\.toml"):
        read_tasks(tmp_path)


def test_duplicate_task_names_are_rejected(tmp_path):
    for name in ("a", "b"):
        write_task(tmp_path / name, {"task.toml": '[task]\nname = "acme/one"\n'})
    with pytest.raises(ConfigError, match="acme/one"):
        read_tasks(tmp_path)


def test_tasks_may_be_two_folders_deep(tmp_path):
    write_task(tmp_path / "2f4e" / "a")
    assert [task.name for task in read_tasks(tmp_path)] == ["a"]


def test_folder_without_tasks_is_reported(tmp_path):
    for folder, named in ((tmp_path, "has a task.toml"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(ConfigError, match=named):
            read_tasks(folder)


def test_separate_verifier_may_have_its_own_image(task_folder):
    files = {"tests/Dockerfile": "FROM x\nCOPY . /tests/\n"}
    assert read_task(task_folder(files)).verifier_image is None
    folder = task_folder({**files, "task.toml": '[verifier]\nenvironment_mode = "separate"\n'})
    assert read_task(folder).verifier_image == ImageSource(folder=folder / "tests")


def test_examples_are_read_without_warnings(caplog):
    assert [task.name for task in read_tasks(EXAMPLES)] == ["fix-median", "log-report", "repair-git"]
    assert not caplog.records
