"""A source of tasks, in any of its forms, to rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rllm.data.files import READERS, read_file
from rllm.data.tables import tasks_of
from rllm.errors import ConfigError, RLLMError, counted
from rllm.registry import load_object
from rllm.types import Task

Source: TypeAlias = str | Path | Callable[[], Iterable[Mapping[str, Any]]]

_HUB_PREFIX = "hf:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def rows_of(source: Source, *, split: str | None, subset: str | None) -> list[Task]:
    """The rows of a source; `Dataset.load` says which forms it has, and what is raised."""
    if not isinstance(source, str | Path):
        _has_no_subsets(source, subset)
        return _rows_of_function(source)
    text, path = str(source), Path(source).expanduser()
    _check_name(text)
    if text.startswith(_HUB_PREFIX):
        return _rows_of_hub(text.removeprefix(_HUB_PREFIX), split, subset)
    if path.is_dir():
        return _rows_of_hub(str(path), split, subset)
    if path.suffix.lower() in READERS or path.exists():
        _has_no_subsets(text, subset)
        return read_file(path)
    if _FUNCTION.fullmatch(text):
        _has_no_subsets(text, subset)
        return _rows_of_function(load_object(text, kind="function"))
    if _HUB_ID.fullmatch(text):
        return _rows_of_hub(text, split, subset)
    raise ConfigError(
        f"{text!r} is no file or folder that is there: use a file of type {', '.join(READERS)}, a folder or id of "
        "Hugging Face datasets ('hf:org/name'), or a function of rows ('package.module:function'); "
        "what DatasetRegistry keeps is read by DatasetRegistry.load_dataset"
    )


def _check_name(text: str) -> None:
    """Refuse what looks like a name of data and cannot be one."""
    if text in ("", _HUB_PREFIX):
        raise ConfigError(f"{text!r} names no data: name a file, such as tasks.jsonl, or a dataset")
    scheme, is_address, rest = text.partition("://")
    if is_address:
        address = f"{scheme}://..." if "@" in rest else text  # where a password may be
        if scheme in ("postgres", "postgresql"):
            raise ConfigError(
                f"{address!r} is a trace store: copy it into a file with rllm store migrate, and name that to rllm sft"
            )
        raise ConfigError(f"{address!r} is an address: download the file, and name it here")
    module, dot_py, function = text.partition(".py:")
    if dot_py:
        module = Path(module).name
        raise ConfigError(f"{text!r}: a function of rows is named by its module, as in '{module}:{function}'")


def name_of(source: Source) -> str:
    """What to call the rows of this source."""
    if not isinstance(source, str | Path):
        return str(getattr(source, "__name__", type(source).__name__))
    if _FUNCTION.fullmatch(str(source)):
        return str(source).rpartition(":")[2]
    path = Path(str(source).removeprefix(_HUB_PREFIX))
    return path.stem if path.suffix.lower() in READERS else path.name


def _rows_of_hub(source: str, split: str | None, subset: str | None) -> list[Task]:
    from rllm.data.hub import read_hub

    return read_hub(source, split=split, subset=subset)


def _rows_of_function(function: Any) -> list[Task]:
    """All rows of one call of a user's function, which may fail at any of them."""
    if not callable(function):
        raise ConfigError(f"{function!r}: use a path, or a function that gives rows; rows go to Dataset(rows)")
    where = f"data function {name_of(function)!r}"
    rows: list[Task] = []
    try:
        for row in tasks_of(function(), where):
            rows.append(row)
    except RLLMError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} raised {type(error).__name__} behind {counted(len(rows), 'row')}: {error}"
        ) from error
    return rows


def _has_no_subsets(source: Any, subset: str | None) -> None:
    if subset is not None:
        raise ConfigError(f"subset={subset!r}: only Hugging Face datasets have subsets, {name_of(source)!r} has none")
