"""Trackers of other projects: TensorBoard, W&B, MLflow and trackio. Each package is imported when its tracker starts.

A tracker cannot remove what it has logged, so each one logs through `LoggedSteps`, which skips steps that an earlier
process of a resumed run has logged.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from typing import Any

from rllm._runtime.ids import new_id
from rllm.config.yaml_file import leaves
from rllm.errors import MissingDependencyError
from rllm.tracking.about import LoggedSteps, kept_id, settings_of
from rllm.tracking.base import Background, Tracker
from rllm.tracking.samples import COLUMNS, Row, sample_rows
from rllm.types import Episode

_MLFLOW_BATCH = 100
"""Parameters that MLflow takes in one request; it takes more metrics."""
_MLFLOW_MAX_VALUE = 500
_MLFLOW_MAX_ROWS = 400
"""Rows of each table, which is rewritten as a whole each time."""
_MLFLOW_SAMPLES = "samples"
_MLFLOW_TABLES = "mlflow.loggedArtifacts"
"""Tag by which MLflow shows an artifact as a table."""


def _import(module: str) -> Any:
    """Import a module of a tracker's package; raise `MissingDependencyError` naming the extra that installs it."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(package, package, f"trackers={package}") from error


class _Tracker(Tracker):
    """Common parts of the trackers below."""

    def __init__(self, run_dir: Path) -> None:
        self._settings = settings_of(run_dir)
        self._name = run_dir.resolve().name
        self._project = str(self._settings.get("project") or "rllm")

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        if rows := sample_rows(step, episodes, int(self._settings.get("log_samples", 2))):
            self._log_table(step, f"samples/{split}", rows)

    def _log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        raise NotImplementedError


class TensorBoardTracker(_Tracker):
    """Writes event files into the run's folder `tensorboard`: scalars, and samples as tables of the text plugin."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        writer = _import("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._event = _import("tensorboard.compat.proto.event_pb2").Event
        self._summary = _import("tensorboard.compat.proto.summary_pb2").Summary
        self._logged = LoggedSteps(run_dir, "tensorboard")
        self._writer = writer(str(run_dir / "tensorboard"))
        settings = json.dumps(self._settings, indent=2)
        self._log(0, {"settings": self._text("settings", f"<pre>{html.escape(settings)}</pre>")})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summary.Value
        self._log(step, {name: value(tag=name, simple_value=float(number)) for name, number in metrics.items()})

    def close(self) -> None:
        self._writer.close()

    def _log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table: list[Row] = [[*COLUMNS], ["---"] * len(COLUMNS), *rows]
        lines = []
        for row in table:
            cells = [html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>") for value in row]
            lines.append(f"| {' | '.join(cells)} |")
        self._log(step, {name: self._text(name, "\n".join(lines))})

    def _text(self, tag: str, markdown: str) -> Any:
        metadata = _import("tensorboard.plugins.text.metadata").create_summary_metadata(display_name="", description="")
        tensor = _import("tensorboard.util.tensor_util").make_tensor_proto([markdown.encode()])
        return self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        def write(new: Mapping[str, Any]) -> None:
            summary = self._summary(value=list(new.values()))
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
            self._writer.flush()

        self._logged.log_new(step, values, write)


class WandbTracker(_Tracker):
    """Logs to one W&B run for each run, also after a resume. `WANDB_MODE`, `WANDB_PROJECT`, ... configure the rest."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._wandb = wandb = _import("wandb")
        # Makes W&B's own process write at once what it receives, since it ends soon after training is killed.
        flush = "x_transaction_log_flush_interval"
        options = {flush: 0.1} if flush in wandb.Settings.model_fields else {}
        self._run = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else self._project,
            name=None if "WANDB_NAME" in os.environ else self._name,
            id=kept_id(run_dir, "wandb", new_id),
            resume="allow",
            reinit="create_new",
            dir=None if "WANDB_DIR" in os.environ else str(run_dir),
            config=dict(self._settings),
            settings=wandb.Settings(console="off", **options),
        )
        self._logged = LoggedSteps(run_dir, "wandb", arrived=last_wandb_step(self._run))
        # W&B's own counter cannot go back to a step that is repeated.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self._logged.log_new(step, metrics, lambda new: self._run.log({"step": step, **new}))

    def close(self) -> None:
        self._run.finish()

    def _log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self.log(step, {name: self._wandb.Table(columns=COLUMNS, data=rows, allow_mixed_types=True)})


def last_wandb_step(run: Any) -> int | None:
    """Return the last step of a resumed W&B run, -1 if it has none; `None` where W&B does not know it, as offline."""
    return run.summary.get("step", -1) if run.resumed else None


class MLflowTracker(_Tracker):
    """Logs to one MLflow run for each run, also after a resume, from a thread.

    `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, ... choose the destination.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._entities = _import("mlflow.entities")
        self._client = _import("mlflow").MlflowClient()
        self._id = kept_id(run_dir, "mlflow", self._new_run)
        self._client.update_run(self._id, status="RUNNING")
        self._logged = LoggedSteps(run_dir, "mlflow")
        self._rows: dict[str, deque[Row]] = defaultdict(lambda: deque(maxlen=_MLFLOW_MAX_ROWS))
        self._background = Background("mlflow")
        self._background.do(self._load_tables)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        values = {name: metric(_mlflow_name(name), float(value), now, step) for name, value in metrics.items()}

        def send(new: Mapping[str, Any]) -> None:
            self._client.log_batch(self._id, metrics=list(new.values()), synchronous=True)

        self._background.do(lambda: self._logged.log_new(step, values, send))

    def close(self) -> None:
        self._background.close()
        self._client.set_terminated(self._id)

    def _log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table = {f"{name}.json": rows}
        self._background.do(lambda: self._logged.log_new(step, table, self._add_rows))

    def _new_run(self) -> str:
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._project
        found = self._client.get_experiment_by_name(project)
        experiment_id = self._client.create_experiment(project) if found is None else found.experiment_id
        run = self._client.create_run(str(experiment_id), run_name=self._name)
        param = self._entities.Param
        settings = [
            param(_mlflow_name(key), str(value)[:_MLFLOW_MAX_VALUE])
            for key, value in dict(leaves(self._settings)).items()
        ]
        for start in range(0, len(settings), _MLFLOW_BATCH):
            batch = settings[start : start + _MLFLOW_BATCH]
            self._client.log_batch(run.info.run_id, params=batch, synchronous=True)
        return str(run.info.run_id)

    def _load_tables(self) -> None:
        """Load the rows that an earlier process of the run has logged."""
        with tempfile.TemporaryDirectory() as folder:
            for found in self._client.list_artifacts(self._id, _MLFLOW_SAMPLES):
                table = Path(self._client.download_artifacts(self._id, found.path, folder)).read_text(encoding="utf-8")
                self._rows[found.path].extend(json.loads(table)["data"])

    def _add_rows(self, tables: Mapping[str, Sequence[Row]]) -> None:
        """Write tables in the form of MLflow's `log_table`, which would first read the whole table back."""
        for path, rows in tables.items():
            self._rows[path].extend(rows)
            self._client.log_dict(self._id, {"columns": COLUMNS, "data": list(self._rows[path])}, path)
        listed = ", ".join(f'{{"path": "{name}", "type": "table"}}' for name in self._rows)
        self._client.set_tag(self._id, _MLFLOW_TABLES, f"[{listed}]")


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow refuses in names: `val/pass@1` becomes `val/pass_at_1`."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))


class TrackioTracker(_Tracker):
    """Logs to one trackio run for each run, also after a resume; on this machine unless `TRACKIO_SPACE_ID` is set."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._trackio = trackio = _import("trackio")
        is_resumed = (run_dir / ".trackio-id").exists()
        with redirect_stdout(sys.stderr):  # stdout is for the output that programs read
            self._run = copy_context().run(  # at exit, trackio would end what it takes for the current run
                trackio.init,
                project=self._project,
                name=kept_id(run_dir, "trackio", lambda: self._name),
                resume="allow" if is_resumed else "never",
                config=dict(leaves(self._settings)),
                embed=False,
            )
        self._logged = LoggedSteps(run_dir, "trackio", arrived=_last_trackio_step(self._run) if is_resumed else None)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self._logged.log_new(step, metrics, lambda new: self._run.log(new, step=step))

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()

    def _log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self.log(step, {name: self._trackio.Table(columns=COLUMNS, data=rows)})


def _last_trackio_step(run: Any) -> int | None:
    """Return the last step of a resumed run, -1 if it has none; `None` if trackio does not expose it."""
    if not hasattr(run, "_initial_last_step"):
        return None
    return -1 if run._initial_last_step is None else int(run._initial_last_step)
