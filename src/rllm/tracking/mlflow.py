"""MLflow, where its own variables say: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ..."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.errors import MissingDependencyError
from rllm.tracking.about import AboutRun, about_run, kept_id
from rllm.tracking.background import Background
from rllm.tracking.samples import COLUMNS, Row, sample_rows
from rllm.tracking.told import Told
from rllm.types import Episode

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
except ModuleNotFoundError as error:
    raise MissingDependencyError.of("mlflow", "mlflow", "trackers=mlflow") from error

_BATCH = 100
"""Parameters that MLflow takes at a time; of metrics it takes more."""
_MAX_VALUE = 500
_KEPT_ROWS = 400
"""Of each table: it is written anew each time."""
_SAMPLES = "samples"
_TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow shows an artifact as a table."""


class MLflowTracker:
    """An MLflow run for each run, gone on with when that is resumed. The server is told in a thread."""

    def __init__(self, run_dir: Path) -> None:
        about = about_run(run_dir)
        self._log_samples = about.log_samples
        self._client = MlflowClient()
        self._id = kept_id(run_dir, "mlflow", lambda: self._new_run(about))
        self._client.update_run(self._id, status="RUNNING")
        self._told = Told(run_dir, "mlflow")
        self._rows: dict[str, deque[Row]] = defaultdict(lambda: deque(maxlen=_KEPT_ROWS))
        self._background = Background("mlflow")
        self._background.do(self._take_up_tables)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        told = {name: Metric(_name(name), float(value), now, step) for name, value in metrics.items()}

        def tell(new: Mapping[str, Metric]) -> None:
            self._client.log_batch(self._id, metrics=list(new.values()), synchronous=True)

        self._background.do(lambda: self._told.once(step, told, tell))

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        rows = sample_rows(step, episodes, self._log_samples)
        if rows:
            table = {f"{_SAMPLES}/{split}.json": rows}
            self._background.do(lambda: self._told.once(step, table, self._add_rows))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        self._background.close()
        self._client.set_terminated(self._id)

    def _new_run(self, about: AboutRun) -> str:
        run = self._client.create_run(self._experiment(about.project), run_name=about.name)
        settings = [Param(_name(key), str(value)[:_MAX_VALUE]) for key, value in about.flat_settings().items()]
        for start in range(0, len(settings), _BATCH):
            self._client.log_batch(run.info.run_id, params=settings[start : start + _BATCH], synchronous=True)
        return str(run.info.run_id)

    def _experiment(self, project: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another process has just made it
            made = self._client.get_experiment_by_name(name)
            if made is None:
                raise
            return str(made.experiment_id)

    def _take_up_tables(self) -> None:
        """Have the rows of the tables as an earlier process has left them."""
        with tempfile.TemporaryDirectory() as folder:
            for found in self._client.list_artifacts(self._id, _SAMPLES):
                table = Path(self._client.download_artifacts(self._id, found.path, folder)).read_text(encoding="utf-8")
                self._rows[found.path].extend(json.loads(table)["data"])

    def _add_rows(self, tables: Mapping[str, Sequence[Row]]) -> None:
        """In the form of MLflow's own `log_table`, which would read the whole table back first."""
        for path, rows in tables.items():
            self._rows[path].extend(rows)
            table: dict[str, Any] = {"columns": COLUMNS, "data": list(self._rows[path])}
            self._client.log_dict(self._id, table, path)
        listed = ", ".join(f'{{"path": "{name}", "type": "table"}}' for name in self._rows)
        self._client.set_tag(self._id, _TABLES, f"[{listed}]")


def _name(name: str) -> str:
    """MLflow's names have letters, digits and `_-. :/` only; `val/pass@1` is `val/pass_at_1` there."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
