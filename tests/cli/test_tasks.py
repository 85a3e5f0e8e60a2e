"""`rllm tasks check`: mistakes are rejected before a sandbox is started; `tests/tasks` runs it."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], "no such folder"),
        (["."], "task.toml"),
        (["one", "--sandbox", "lokal"], "did you mean 'local'"),
    ],
)
def test_invalid_arguments_are_rejected(fails, work, arguments, named):
    for name in ("task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"):
        path = work / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "task.toml" else "FROM x\n")
    if arguments == ["."]:
        (work / "one" / "task.toml").write_text("[agent]\ntimeout_sec = 0")
    code, printed = fails("tasks", "check", *arguments)
    assert code == 2
    assert named in printed
