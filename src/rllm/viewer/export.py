"""Export of a run as one HTML file without scripts: charts, steps, and the most informative rollouts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rllm._runtime.files import replace_text
from rllm.capture import SessionTree
from rllm.errors import ConfigError
from rllm.types import grouped
from rllm.viewer import charts
from rllm.viewer.charts import Row, is_trained
from rllm.viewer.graph import Graph, graph_of
from rllm.viewer.pages import table_of
from rllm.viewer.render import HERE, render
from rllm.viewer.rollouts import StoredRollout
from rllm.viewer.runs import Run, Runs
from rllm.viewer.texts import fields_of
from rllm.viewer.tokens import TokenTable

_MAX_STEPS = 40


@dataclass(frozen=True, kw_only=True)
class RolloutDetails:
    """A rollout shown in full."""

    rollout: StoredRollout
    task: Mapping[str, str]
    graph: Graph
    table: TokenTable | None


def export_report(source: str, path: Path, *, num_rollouts: int = 40) -> int:
    """Write the report of a run atomically, and return the number of rollouts shown in full.

    Args:
        source: a run folder, or a trace store.
        path: the file; an existing one is replaced.
        num_rollouts: number of rollouts to show in full: failed ones, and those with extreme advantages.
    """
    runs = Runs([source])
    try:
        found = runs.all()
        if len(found) != 1:
            names = ", ".join(run.name for run in found[:5]) or "none"
            raise ConfigError(f"run={source!r} holds {len(found)} runs ({names}): name one of them")
        shown, html = _report(found[0], num_rollouts)
        replace_text(path, html)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror or error}): choose another path"
        ) from error
    finally:
        runs.close()
    return shown


def _report(run: Run, num_rollouts: int) -> tuple[int, str]:
    rows = run.rows()
    every = run.rollouts.all()
    chosen = [_shown(run, rollout) for rollout in most_informative(every, num_rollouts)]
    style = (HERE / "static" / "viewer.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    return len(chosen), render(
        "report.html",
        {
            "run": run,
            "rows": rows,
            "latest": rows[-1] if rows else {},
            "charts": charts.charts_of([(run.name, rows)]),
            "steps": [(row, _by_task(run.rollouts.of_step(int(row["step"])))) for row in _spread(rows)],
            "shown": chosen,
            "shown_ids": {item.rollout.session_id for item in chosen},
            "num_rollouts": len(every),
            "vocabulary": run.vocabulary,
            "style": style,
            "policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        },
    )


def most_informative(rollouts: Sequence[StoredRollout], count: int) -> list[StoredRollout]:
    """Return the most informative rollouts, in order of time.

    A quarter are failed ones; the others alternate between the best and the worst advantages, then come the newest.
    """
    failed = [item for item in rollouts if item.error][: count // 4]

    def advantage(rollout: StoredRollout) -> float:
        return max((path.advantage or 0.0 for path in rollout.paths), key=abs, default=0.0)

    credited = sorted((item for item in rollouts if item.paths and not item.error), key=advantage)
    best_and_worst = [item for pair in zip(reversed(credited), credited, strict=True) for item in pair]
    chosen = {item.session_id: item for item in (*failed, *best_and_worst, *rollouts)}
    return sorted(list(chosen.values())[:count], key=lambda item: item.created_at)


def _shown(run: Run, rollout: StoredRollout) -> RolloutDetails:
    traces, credits_ = run.calls(rollout.session_id)
    ends = SessionTree(traces).leaves()
    table = table_of(run, rollout, ends[0]) if ends else None
    task = fields_of(run.task_of(rollout))
    return RolloutDetails(rollout=rollout, task=task, graph=graph_of(rollout, traces, credits_), table=table)


def _spread(rows: Sequence[Row]) -> list[Row]:
    """Return the training steps; if there are very many, a sample with the first and the last."""
    trained = [row for row in rows if is_trained(row)]
    if len(trained) <= _MAX_STEPS:
        return trained
    places = {round(number * (len(trained) - 1) / (_MAX_STEPS - 1)) for number in range(_MAX_STEPS)}
    return [trained[place] for place in sorted(places)]


def _by_task(rollouts: Iterable[StoredRollout]) -> list[tuple[str, list[StoredRollout]]]:
    tasks = grouped((rollout.task_id, rollout) for rollout in rollouts)
    return [(members[0].task_name, members) for members in tasks.values()]
