"""Install frameworks, each into its own environment: their pins contradict each other.

    python tests/frameworks/install.py FOLDER [NAME ...]

Without names, all of examples/frameworks. An environment whose requirements have not changed is left as it is. A
framework that cannot be installed is reported, and is red in the tests; the others are still installed.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
REQUIREMENTS = ("requirements.txt", "package.json")
AT_ONCE = 2
"""Half of the time is spent on waiting for the network."""


def main(folder: Path, names: list[str]) -> None:
    names = names or sorted({path.parent.name for file in REQUIREMENTS for path in EXAMPLES.glob(f"*/{file}")})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, error in zip(names, pool.map(lambda name: tried(folder / name, EXAMPLES / name), names), strict=True):
            if error:
                print(f"{name} does not install: {error}", file=sys.stderr)


def tried(environment: Path, example: Path) -> str | None:
    """Install an example's requirements; return the error, if there is one."""
    try:
        install(environment, example)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


def install(environment: Path, example: Path) -> None:
    required = {file: (example / file).read_text() for file in REQUIREMENTS if (example / file).exists()}
    wanted, installed = "".join(required.values()), environment / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return
    print(f"Installing {example.name} (once) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    if "requirements.txt" in required:
        pip = [environment / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-r", example / "requirements.txt"], check=True)
    if "package.json" in required:
        (environment / "package.json").write_text(required["package.json"])
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=environment, check=True)
    installed.write_text(wanted)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
