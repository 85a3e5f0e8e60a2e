"""Install bubblewrap and podman with apt-get, and make the Debian image of the tests; needs root where one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = {
    "bwrap": "bubblewrap",
    "podman": "podman",
    "runc": "runc",
    "newuidmap": "uidmap",
    "fuse-overlayfs": "fuse-overlayfs",
    "mmdebstrap": "mmdebstrap",
}
"""Programs and their packages."""
IMAGE = "localhost/debian-min"
INCLUDED = "python3,git,ca-certificates"


def main() -> None:
    if problem := install():
        banner = "=" * 78
        sys.exit(f"{banner}\nTESTS OF SANDBOXES WITHOUT THESE PROGRAMS ARE SKIPPED: {problem}\n{banner}")


def install() -> str:
    """Install missing programs; return why that is not possible, or an empty text."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program, path=_path())]
    try:
        if missing:
            remedy = f"{', '.join(missing)} missing: as root, apt-get install {' '.join(missing)}"
            if not shutil.which("apt-get") or (os.geteuid() != 0 and not can_be_root()):
                return remedy
            as_root = () if os.geteuid() == 0 else ("sudo",)
            run(*as_root, "apt-get", "update", "--quiet")
            run(*as_root, "apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *missing)
        if subprocess.run(["podman", "image", "exists", IMAGE]).returncode:
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / "root.tar"
                run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={INCLUDED}", "bookworm", str(archive))
                run("podman", "import", "--quiet", str(archive), IMAGE)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return ""


def can_be_root() -> bool:
    return bool(shutil.which("sudo")) and not subprocess.run(["sudo", "--non-interactive", "true"]).returncode


def run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


if __name__ == "__main__":
    main()
