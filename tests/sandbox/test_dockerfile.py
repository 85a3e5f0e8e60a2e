"""Dockerfiles as steps in a sandbox, for backends that build no images."""

import pytest

from rllm.sandbox.base import SandboxError
from rllm.sandbox.images import Copy, Run, read_dockerfile


def read(folder, text, files=("a.txt", "src/b.txt")):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder)


def test_steps_use_the_folder_and_variables_at_their_position(tmp_path):
    recipe = read(
        tmp_path,
        "# syntax=docker/dockerfile:1\nFROM --platform=linux/amd64 debian:12 AS base\nENV A=1 B='2 3'\nWORKDIR /app\n"
        "COPY a.txt src/ ./\nRUN echo one && \\\n    echo two\nENV C the value\nWORKDIR sub\n"
        'RUN ["ls", "-l"]\nCMD sleep 1\n',
    )
    assert (recipe.base, recipe.workdir, recipe.env) == (
        "debian:12",
        "/app/sub",
        {"A": "1", "B": "2 3", "C": "the value"},
    )
    first = {"A": "1", "B": "2 3"}
    assert recipe.steps == (
        Run(command=["mkdir", "-p", "/app"], cwd="/", env=first, line=4),
        Copy(tmp_path / "a.txt", "/app/a.txt"),
        Copy(tmp_path / "src", "/app"),
        Run(command="echo one &&      echo two", cwd="/app", env=first, line=6),
        Run(command=["mkdir", "-p", "/app/sub"], cwd="/", env=recipe.env, line=9),
        Run(command=["ls", "-l"], cwd="/app/sub", env=recipe.env, line=10),
    )


def test_file_is_copied_to_a_name_or_into_a_folder(tmp_path):
    recipe = read(tmp_path, "FROM x\nCOPY a.txt /b.txt\nCOPY a.txt /etc/\nCOPY . /all\nADD *.txt /texts/\n")
    assert [(step.source.name, step.target) for step in recipe.steps] == [
        ("a.txt", "/b.txt"),
        ("a.txt", "/etc/a.txt"),
        (tmp_path.name, "/all"),
        ("a.txt", "/texts/a.txt"),
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("FROM other", "second FROM"),
        ("COPY --from=base /a /b", "COPY"),
        ("ADD https://example.org/a /a", "COPY"),
        ("COPY nowhere /a", "nowhere"),
        ("COPY ../a /a", "to copy"),
        ("WORKDIR $HOME", "variable"),
        ("RUN --mount=type=cache ls", "options"),
        ("RUN cat <<END", "here-document"),
        ("USER ada", "USER ada"),
        ("VOLUME /data", "VOLUME"),
        ("ARG VERSION=1", "ARG"),
        ("WORKDIR", "without arguments"),
    ],
)
def test_steps_that_need_an_image_are_rejected_with_their_line(tmp_path, line, named):
    with pytest.raises(SandboxError, match=rf"line 2.*{named}"):
        read(tmp_path, f"FROM x\n{line}\n")


def test_dockerfile_must_have_a_base(tmp_path):
    with pytest.raises(SandboxError, match="no FROM"):
        read(tmp_path, "RUN ls\n")
