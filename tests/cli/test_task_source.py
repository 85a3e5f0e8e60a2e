import pytest

from rllm.cli.inputs import read_tasks, tasks_for
from rllm.data import DatasetRegistry
from rllm.errors import ConfigError

ROWS = [{"question": "a"}, {"question": "b"}]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user's folder, with two registered datasets."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    DatasetRegistry.register_dataset("sums", ROWS[:1], "train")
    DatasetRegistry.register_dataset("sums", ROWS, "test")
    DatasetRegistry.register_dataset("one.split", ROWS, "all")
    return tmp_path


def test_registered_dataset_is_found_by_name_and_split():
    assert list(read_tasks("sums", "test", option="--data")) == ROWS
    assert list(read_tasks("sums", "train", option="--data")) == ROWS[:1]
    assert list(read_tasks("one.split", None, option="--data")) == ROWS


def test_file_takes_precedence_over_a_registered_name(home):
    (home / "tasks.jsonl").write_text('{"question": "c"}\n')
    assert list(read_tasks("tasks.jsonl", None, option="--data")) == [{"question": "c"}]


@pytest.mark.parametrize(
    ("source", "split", "expected"),
    [
        ("sums", None, "--split is missing: dataset 'sums' has the splits test, train"),
        ("sums", "val", "--split val: dataset 'sums' has the splits test, train"),
        ("summs", None, "--data summs: it is neither a file nor registered; registered: one.split, sums"),
        ("grid_world", None, "python -m rllm.data.prepare grid_world"),
        ("math500", "train", "--split train: dataset 'math500' has the splits test"),
        ("none.jsonl", None, "--data: 'none.jsonl': no such file"),
        (
            "home",
            None,
            "--data: split=None: 'home' has the splits train, test; choose one of them (--split, --val-split)",
        ),
    ],
)
def test_missing_file_or_dataset_is_reported(source, split, expected):
    with pytest.raises(ConfigError) as raised:
        read_tasks(source, split, option="--data")
    assert expected in str(raised.value)


@pytest.mark.parametrize("source", ["-", ""])
def test_invalid_dataset_name_error_names_the_option(source):
    with pytest.raises(ConfigError, match=r"^--data: "):
        read_tasks(source, None, option="--data")


def test_file_has_no_splits(home):
    (home / "tasks.jsonl").write_text('{"question": "c"}\n')
    with pytest.raises(ConfigError, match=r"--split test: 'tasks.jsonl' is a file, which has no splits$"):
        read_tasks("tasks.jsonl", "test", option="--data")


def agent(question, answer):
    return 1.0


@pytest.mark.parametrize(
    ("content", "split", "expected"),
    [
        ('{"question": \n', None, "--val: tasks.jsonl, line 1, column 13 is not valid JSON"),
        ("", None, "--val: tasks is empty"),
        ('{"question": "c"}\n', None, "--val: row 0 of tasks: agent needs 'answer'"),
        ('{"question": "c"}\n', "test", "--val-split test: 'tasks.jsonl' is a file"),
    ],
)
def test_errors_name_the_option_at_fault(home, content, split, expected):
    (home / "tasks.jsonl").write_text(content)
    with pytest.raises(ConfigError) as raised:
        tasks_for(agent, "tasks.jsonl", split, option="--val")
    assert str(raised.value).startswith(expected)
