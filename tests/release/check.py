"""Checks of a release: build it from the commit, inspect the wheel, install it by itself, and use it there.

    python tests/release/check.py [--out DIR] [--demo]

`--out` keeps the wheel and the source distribution; `--demo` also runs the whole demo, which takes some minutes. Other
packages are downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = (
    "rllm/py.typed",
    "rllm/cli/new_project/gitignore",
    "rllm/cli/new_project/tests/test_agent.py",
    "rllm/trainer/config/agent_ppo_trainer.yaml",
    "rllm/viewer/static/viewer.js",
    "rllm/viewer/templates/base.html",
)
"""Files that are not imported."""


def main() -> None:
    """Check, and exit with an error at the first problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the built files go")
    parser.add_argument("--demo", action="store_true", help="run the demo, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rllm-release-") as folder:
        work = Path(folder)
        source = committed(work / "source")
        environment = work / "venv"
        report("making an environment")
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        wheel, archive = built(source, environment, work / "dist")
        check_wheel(wheel, source)
        report(f"installing {wheel.name}[train] (some minutes)")
        pip(environment, "-c", source / "constraints.txt", f"{wheel}[train]", "pytest")
        use(environment, version_of(source), work / "elsewhere", demo=options.demo)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            for file in (wheel, archive):
                report(str(shutil.copy2(file, options.out)))
    report("the release is sound")


def committed(folder: Path) -> Path:
    """Return the files of the last commit, and no others in the folder."""
    folder.mkdir()
    packed = folder.with_suffix(".tar")
    subprocess.run(["git", "archive", "--output", packed, "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(packed) as files:
        files.extractall(folder, filter="data")
    return folder


def built(source: Path, environment: Path, out: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution."""
    report("building")
    pip(environment, "hatchling")
    run(environment, "python", "-m", "hatchling", "build", "-d", out, cwd=source)
    [wheel], [archive] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def check_wheel(wheel: Path, source: Path) -> None:
    """Check that the wheel has exactly the committed files of the package."""
    with zipfile.ZipFile(wheel) as files:
        packed = {name for name in files.namelist() if ".dist-info/" not in name}
    package = source / "src"
    expected = {str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()}
    require(packed == expected, f"not in the wheel: {expected - packed}; only in the wheel: {packed - expected}")
    require(packed >= set(NEEDED), f"missing: {set(NEEDED) - packed}")
    strangers = [name for name in packed if "tests/" in name and not name.startswith("rllm/cli/new_project/")]
    require(not strangers, f"tests are in the wheel: {strangers}")
    report(f"{wheel.name} has the {len(packed)} files of the package")


def use(environment: Path, version: str, folder: Path, *, demo: bool) -> None:
    """Take the first steps of a user, outside of the source folder."""
    folder.mkdir()
    found = run(environment, "rllm", "--version", cwd=folder)
    require(version in found, f"rllm --version prints {found!r}, and pyproject.toml has {version!r}")
    run(environment, "rllm", "demo", "--help", cwd=folder)
    run(
        environment,
        "python",
        "-c",
        "import rllm.sdk, rllm.testing, rllm.viewer, rllm.trainer.agent_trainer",
        cwd=folder,
    )
    run(environment, "rllm", "init", "project", cwd=folder)
    run(environment, "python", "-m", "pytest", "-q", cwd=folder / "project")
    report("installed by itself, it makes a project that passes its tests")
    if demo:
        found = json.loads(run(environment, "rllm", "demo", "--json", cwd=folder).splitlines()[-1])
        before, after = found["accuracy_before"], found["accuracy_after"]
        require(after > before, f"the demo learns nothing: {found}")
        report(f"the demo's held-out accuracy went from {before:.0%} to {after:.0%}")


def version_of(source: Path) -> str:
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def pip(environment: Path, *arguments: object) -> None:
    run(environment, "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments, cwd=ROOT)


def run(environment: Path, program: str, *arguments: object, cwd: Path) -> str:
    """Return the output of a program of the environment; this process's own Python does not affect it."""
    command = [str(environment / "bin" / program), *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    require(done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"release: {otherwise}")


def report(what: str) -> None:
    print(f"release: {what}", flush=True)


if __name__ == "__main__":
    main()
