"""Files that an agent changed."""

import os

from rllm.tasks.changes import changes, diff
from rllm.tasks.task import MAX_TEXT


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(exist_ok=True)
    return folder


def test_added_changed_and_removed_files_are_listed(tmp_path):
    before = write(tmp_path / "before", {"same": b"1", "a/text": b"one\ntwo\n", "gone": b"x\n", ".git/HEAD": b"1"})
    after = write(tmp_path / "after", {"same": b"1", "a/text": b"one\n2\n", "new": b"\0\1", ".git/HEAD": b"22"})
    (after / "link").symlink_to("same")
    changed = changes(before, after)
    assert list(map(str, changed)) == [
        "changed .git (2 bytes)",
        "changed a/text (6 bytes)",
        "removed gone",
        "added link (4 bytes)",
        "added new (2 bytes)",
    ]
    assert diff(before, after) == (
        "--- a/a/text\n+++ b/a/text\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
        "--- a/gone\n+++ b/gone\n@@ -1 +0,0 @@\n-x\n"
        "--- a/link\n+++ b/link\n@@ -0,0 +1 @@\n+-> same\n"
    )


def test_long_diff_is_truncated_and_a_file_of_many_lines_is_only_listed(tmp_path):
    before = write(tmp_path / "before", {})
    after = write(tmp_path / "after", {"b": b"\n" * 9000})
    assert (len(changes(before, after)), diff(before, after)) == (1, "")
    write(after, {"a": b"word\n" * 900})
    assert diff(before, after).endswith("[...]")
    assert len(diff(before, after)) <= MAX_TEXT


def test_undecodable_and_control_characters_in_file_names_are_replaced(tmp_path):
    before, after = write(tmp_path / "before", {}), write(tmp_path / "after", {})
    for name in (b"a\xff", b"b\nremoved c", b"d\x1b[31m"):
        (after / os.fsdecode(name)).write_bytes(b"x")
    names = [change.path for change in changes(before, after)]
    assert names == ["a\ufffd", "b\u2424removed c", "d\u241b[31m"]
    assert diff(before, after).encode().count(b"+++ b/") == 3
