"""Run folders: name, settings and ids of a run, how it was begun, and which folders are the user's own.

A run's `config.yaml` and `begun_as.yaml` name code (agent, reward, trackers) and locations (the trace store); an
`evaluation.json` names the model's folder. In a folder that someone else made, they may name nothing outside it. A run
is known as the user's own by a seal: an HMAC of these files and the folder's place under a key in `$RLLM_HOME`
(`~/.rllm`). A copy of a run, which others may have changed otherwise, is not the user's own. `RLLM_TRUSTED_RUNS`
extends that trust to whole folders.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from rllm._runtime.files import is_named_by, lines_of, lock, replace_text
from rllm._runtime.ids import new_id
from rllm._runtime.untrusted import parse_json
from rllm.config.yaml_file import read_settings
from rllm.errors import ConfigError
from rllm.registry import closest
from rllm.store import path_of
from rllm.types import JSONObject

Beginning: TypeAlias = dict[str, Any]
"""Arguments of the command that began a run, by name: texts, and for `data` of `rllm train` a list of them."""
SETTINGS, BEGUN_AS, STORE, EVALUATION = "config.yaml", "begun_as.yaml", "traces.db", "evaluation.json"
LOCK_FILE = ".lock"
_MAX_NAMED = 3
_SEAL = ".seal"
_TRUSTED = "RLLM_TRUSTED_RUNS"
_KEY_BYTES = 32

V = TypeVar("V")


def kept_id(run_dir: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id of this run in a tracker, which is made once and kept when the run is resumed."""
    path = run_dir / f".{tracker}-id"
    if not path.exists():
        replace_text(path, make())
    return path.read_text(encoding="utf-8").strip()


def kept_run_id(run_dir: Path) -> str:
    """Return the id of this run in a trace store, which several runs may share."""
    return kept_id(run_dir, "store", lambda: f"{run_dir.name}-{new_id()[:8]}")


def run_id_of(folder: Path) -> str | None:
    """Return the id that `kept_run_id` made for the run in this folder; `None` if there is none."""
    path = folder / ".store-id"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(4096).decode(errors="replace").strip()


class LoggedSteps:
    """Last step of each name that a tracker has logged, kept in the run's folder.

    A resumed run repeats steps, and trackers cannot remove what earlier processes have logged.
    """

    def __init__(self, run_dir: Path, tracker: str, *, arrived: int | None = None) -> None:
        """Read the record of earlier processes.

        Args:
            run_dir: the run's folder.
            tracker: the tracker's name.
            arrived: last step that the tracker itself has, if it can report it. Later steps were sent in a thread and
                lost when the process was killed, so they are logged again.
        """
        self._path = run_dir / f".{tracker}-logged"
        self._latest: dict[str, int] = json.loads(self._path.read_text()) if self._path.exists() else {}
        last = max(self._latest.values(), default=-1) if arrived is None else arrived
        self._earlier = {name: min(step, last) for name, step in self._latest.items()}

    def log_new(self, step: int, values: Mapping[str, V], log: Callable[[dict[str, V]], object]) -> None:
        """Call `log` with the values that no earlier process has logged for this step, if any, and record them."""
        new = {name: value for name, value in values.items() if step > self._earlier.get(name, -1)}
        if new:
            log(new)
            self._latest |= dict.fromkeys(new, step)
            replace_text(self._path, json.dumps(self._latest))


def forget_trackers(run_dir: Path) -> None:
    """Delete the trackers' records of a run, so that it starts as a new one. TensorBoard events of others stay."""
    events = "tensorboard/events.*" if (run_dir / ".tensorboard-logged").exists() else ""
    for pattern in filter(None, (events, ".*-id", ".*-logged")):
        for path in run_dir.glob(pattern):
            path.unlink()


def seal(run_dir: Path) -> None:
    """Mark a run folder, in its present state and place, as the user's own. Does nothing if the key cannot be kept."""
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


def settings_of(folder: Path) -> JSONObject:
    """Return the settings of a run, none without a `config.yaml`; raise `ConfigError` if it cannot be read."""
    path = folder / SETTINGS
    return read_settings(path)[0] if path.is_file() else {}


def way_to_a_run(named: Path, *, or_evaluation: bool = False) -> str:
    """Return, for a message on a folder that is not a run (or evaluation), those near it and how to name one."""
    places = [Path("runs"), Path("evals")] if or_evaluation else [Path("runs")]
    for folder in (named, *(named / place for place in places), *places):
        marks = [path for mark in (SETTINGS, EVALUATION)[: len(places)] for path in folder.glob(f"*/{mark}")]
        names = [path.parent.name for path in sorted(marks, key=lambda path: path.stat().st_mtime, reverse=True)]
        if names:
            meant = folder / (closest(named.name, names) or names[0])
            more = ", ..." if len(names) > _MAX_NAMED else ""
            return (
                f"runs in {folder.resolve()}: {', '.join(names[:_MAX_NAMED])}{more}; name one by its path, such as "
                f"{meant}"
            )
    empty = " or ".join(str(place.absolute()) for place in places)
    return f"there are no runs in {empty}; name one by its path, such as /path/to/runs/NAME"


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
    found = next(leading_out(folder), None)
    if found is not None and not is_own(folder):
        path, what = found
        raise ConfigError(
            f"run={str(folder)!r}: {str(path.relative_to(folder))!r} is {what}, and you did not begin this run here: "
            f"{how_to_trust(folder)}"
        )


def leading_out(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield links that lead out of a folder, pipes and devices, at any depth, each with a description."""
    inside = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except OSError:  # a running run has just removed the file
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
    for name in (SETTINGS, BEGUN_AS, EVALUATION):
        try:
            content = (run_dir / name).read_bytes()
        except FileNotFoundError:
            if name == EVALUATION:
                continue  # a run has none, and its seal does not depend on it
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


def check_places(run_dir: Path, store: str | None) -> None:
    """Raise `ConfigError` if `run_dir` cannot be a run's folder or `store` its trace store; nothing is created yet."""
    nearest = nearest_folder(str(run_dir))
    if not nearest.is_dir():
        raise ConfigError(
            f"run_dir={str(run_dir)!r} cannot be created: {str(nearest)!r} is a file; choose another folder"
        )
    if (why := why_unwritable(nearest)) is not None:
        raise ConfigError(f"run_dir={str(run_dir)!r} cannot be written to ({why}): choose another folder")
    if store is not None and (path := path_of(store)) is not None and Path(path).expanduser().is_dir():
        raise ConfigError(f"store={store!r} is a folder: name a file in it, such as {str(Path(path, 'traces.db'))!r}")


@contextmanager
def in_use(folder: Path, setting: str = "run_dir") -> Iterator[None]:
    """Hold a folder, created if needed, until the end; raise `ConfigError` if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(
            f"{setting}={str(folder)!r} cannot be used ({error.strerror}): choose another folder"
        ) from error
    with held as file:
        if not lock(file):
            raise ConfigError(
                f"{setting}={str(folder)!r} is in use by another process: wait for it, or choose another folder"
            )
        yield


def keep_beginning(run_dir: Path, arguments: Beginning) -> None:
    """Store the arguments of the run's command, by name; they and the settings are needed to begin it again."""
    replace_text(run_dir / BEGUN_AS, yaml.safe_dump(dict(arguments), sort_keys=False))


def beginning_of(run_dir: Path) -> Beginning:
    """Return what `keep_beginning` stored; empty for a run that no command began."""
    path = run_dir / BEGUN_AS
    return read_settings(path)[0] if path.exists() else {}


def evaluations_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of every evaluation of a run with its `step`, in order; cut-off lines are skipped."""
    rows = map(parse_json, lines_of(run_dir / "metrics.jsonl"))
    return [row for row in rows if any(name.startswith("eval/") for name in row)]


def nearest_folder(folder: str) -> Path:
    """Return the nearest existing parent of a folder, or the folder itself."""
    path = Path(folder)
    return next(parent for parent in (path, *path.parents) if parent.exists())


def why_unwritable(folder: Path) -> str | None:
    """Return the system's reason against writing a file there, or `None`; the trial file is removed at once."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
