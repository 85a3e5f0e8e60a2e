"""Tasks of a git repository, fetched once for each commit."""

import subprocess

import pytest

from rllm.errors import ConfigError
from rllm.tasks.folder import fetched, is_repository, read_tasks

from .conftest import write_task


def git(folder, *arguments):
    command = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose branch `main` has one task, and whose tag `old` had another instruction."""
    monkeypatch.setenv("RLLM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    task = write_task(folder / "sets" / "one", {"instruction.md": "Old.\n"})
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Old")
    git(folder, "tag", "old")
    (task / "instruction.md").write_text("New.\n")
    git(folder, "commit", "-qam", "New")
    return folder


def test_tasks_are_read_from_a_branch_a_tag_or_a_commit(repository):
    url, old = f"file://{repository}", git(repository, "rev-parse", "old")
    instructions = {
        source: read_tasks(f"{url}{source}")[0].instruction
        for source in ("#:sets", "#main:sets", "#old:sets/one", f"#{old}:sets")
    }
    assert instructions == {
        "#:sets": "New.\n",
        "#main:sets": "New.\n",
        "#old:sets/one": "Old.\n",
        f"#{old}:sets": "Old.\n",
    }


def test_moved_branch_is_fetched_again_and_a_commit_never(repository):
    url = f"file://{repository}"
    commit = git(repository, "rev-parse", "main")
    before = fetched(f"{url}#{commit}")
    git(repository, "commit", "-q", "--allow-empty", "-m", "Newer")
    assert fetched(url) != before
    repository.rename(repository.with_name("moved"))
    assert fetched(f"{url}#{commit}") == before
    with pytest.raises(ConfigError, match="cannot be fetched"):
        fetched(url)


def test_missing_references_are_reported(repository):
    url = f"file://{repository}"
    with pytest.raises(ConfigError, match=r"'nowhere'.*main, old"):
        fetched(f"{url}#nowhere")
    for subfolder in ("nowhere", "../.."):
        with pytest.raises(ConfigError, match="no folder"):
            fetched(f"{url}#main:{subfolder}")
    with pytest.raises(ConfigError, match="not a branch"):
        fetched(f"{url}#--upload-pack=x")


def test_urls_are_distinguished_from_folders():
    assert all(map(is_repository, ("https://example.org/a.git", "git@example.org:a/b.git", "file:///a#x:y")))
    assert not any(map(is_repository, ("tasks", "./a:b", "/a/b.git", "ext::sh -c id")))
