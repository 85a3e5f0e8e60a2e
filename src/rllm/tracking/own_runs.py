"""Run folders of the user's own, and the limits on all others.

A run's `config.yaml` and `begun_as.yaml` name code (agent, reward, trackers) and places (the trace store). In a folder
that someone else made, they may name nothing outside it. A run is known as the user's own by a seal: an HMAC of both
files and the folder's place under a key in `$RLLM_HOME` (`~/.rllm`). A copy of a run, which others may have changed
otherwise, is not the user's own. `RLLM_TRUSTED_RUNS` extends that trust to whole folders.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllm._runtime.files import is_named_by, replace_text
from rllm.config.yaml_file import read_settings
from rllm.errors import ConfigError

SETTINGS, BEGUN_AS, STORE = "config.yaml", "begun_as.yaml", "traces.db"
_SEAL = ".seal"
_TRUSTED = "RLLM_TRUSTED_RUNS"
_KEY_BYTES = 32


def seal(run_dir: Path) -> None:
    """Mark a run folder as the user's own, as and where it is now. Does nothing where the key cannot be kept."""
    if (digest := _digest(run_dir, create_key=True)) is not None:
        replace_text(run_dir / _SEAL, digest)


def is_own(run_dir: Path) -> bool:
    """Return whether this user began the run here, with these settings, or trusts the folder it is in."""
    if is_named_by(_TRUSTED, run_dir):
        return True
    digest = _digest(run_dir, create_key=False)
    try:
        return digest is not None and hmac.compare_digest(digest, (run_dir / _SEAL).read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, TypeError):
        return False


def how_to_trust(run_dir: Path) -> str:
    """Return the remedy for a message about a folder that is not the user's own."""
    return f"if you trust the folder, set {_TRUSTED}={run_dir.resolve()}"


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a run; none if the folder has no `config.yaml`.

    Raises:
        ConfigError: if the file cannot be read.
    """
    path = folder / SETTINGS
    return read_settings(path)[0] if path.is_file() else {}


def store_of_run(folder: Path) -> str | None:
    """Return path or URL of a run's traces; `None` if the folder has none and names none.

    Raises:
        ConfigError: if the folder names a place outside itself, and is not the user's own; or its settings are
            unreadable.
    """
    check_contained(folder)
    if url := settings_of(folder).get("store"):
        if is_own(folder):
            return str(url)
        raise ConfigError(
            f"run={str(folder)!r}: its {SETTINGS} places the traces outside the folder (a setting `store`), and you "
            f"did not begin this run here: {how_to_trust(folder)}"
        )
    return str(folder / STORE) if (folder / STORE).is_file() else None


def check_contained(folder: Path) -> None:
    """Refuse a folder with links that lead out of it, or with pipes and devices, unless it is the user's own.

    Raises:
        ConfigError: naming the link or the pipe.
    """
    found = next(_leading_out(folder), None)
    if found is not None and not is_own(folder):
        path, what = found
        raise ConfigError(
            f"run={str(folder)!r}: {str(path.relative_to(folder))!r} is {what}, and you did not begin this run here: "
            f"{how_to_trust(folder)}"
        )


def _leading_out(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield what a run's folder has, at any depth, beside files and folders of its own, and what it is."""
    inside = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except OSError:  # of a run that goes on, and removes a file just now
                continue
            if stat.S_ISLNK(mode):
                if not Path(os.path.realpath(path)).is_relative_to(inside):  # `resolve` raises for links in a circle
                    yield path, "a link out of the folder"
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                yield path, "a pipe or a device"


def _digest(run_dir: Path, *, create_key: bool) -> str | None:
    key = _key(create=create_key)
    if key is None:
        return None
    digest = hmac.new(key, os.fsencode(run_dir.resolve()), digestmod="sha256")
    for name in (SETTINGS, BEGUN_AS):
        try:
            content = (run_dir / name).read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError:
            return None
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _key(*, create: bool) -> bytes | None:
    """Return the user's key; `None` if there is none, or it cannot be kept."""
    try:
        path = Path(os.environ.get("RLLM_HOME") or "~/.rllm").expanduser() / "run-key"
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = path.with_name(f"run-key.{secrets.token_hex(4)}")
            new.touch(mode=0o600)
            new.write_bytes(secrets.token_bytes(_KEY_BYTES))
            try:
                os.link(new, path)  # fails if another process was faster
            except FileExistsError:
                pass
            finally:
                new.unlink()
        key = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None
    return key if len(key) == _KEY_BYTES else None
