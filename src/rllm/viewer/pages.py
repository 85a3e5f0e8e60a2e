"""What each page shows: a run and a query to the values that its template draws."""

from __future__ import annotations

from typing import Any

from rllm.capture import SessionTree
from rllm.types import DRIFT_KEY
from rllm.viewer import charts
from rllm.viewer.graph import graph_of
from rllm.viewer.lookup import Given, NotFoundError, Page, rollout_named, whole
from rllm.viewer.messages import fields_of
from rllm.viewer.metrics import is_trained, neighbours
from rllm.viewer.rollouts import Rollout
from rllm.viewer.runs import HOW_TO_MAKE_ONE, Run, Runs
from rllm.viewer.search import SORTS, Query, search
from rllm.viewer.timeline import timeline
from rllm.viewer.truth import truth_of

ROWS_PER_PAGE = 100
STEPS_PER_PAGE = 200
_MAX_COMPARED = 4
"""Runs in one chart."""


def home(runs: Runs) -> Page:
    """The runs, those that were changed last first."""
    rows = [(run, run.rows()) for run in runs.all()]
    return "home.html", {"runs": rows, "how": HOW_TO_MAKE_ONE, "run": None}


def run_page(run: Run, runs: Runs, given: Given) -> Page:
    """Charts, and the steps."""
    others = [found for name in given.get("with", "").split(",") if name and (found := runs.get(name)) is not None]
    shown = [run, *[other for other in others if other is not run][: _MAX_COMPARED - 1]]
    first, last = whole(given, "from"), whole(given, "to")
    rows = run.rows()
    trained = [row for row in rows if is_trained(row)]
    staleness = run.setting("rollout", "max_staleness")
    page = whole(given, "page") or 0
    newest = [
        row
        for row in reversed(rows)
        if (first is None or row["step"] >= first) and (last is None or row["step"] <= last)
    ]
    return "run.html", {
        "run": run,
        "charts": charts.charts_of([(item.name, item.rows()) for item in shown], first=first, last=last),
        "lights": charts.sync_lights(trained, max_staleness=staleness if isinstance(staleness, int) else 0),
        "rows": newest[page * STEPS_PER_PAGE : (page + 1) * STEPS_PER_PAGE],
        "page": page,
        "num_pages": -(-len(newest) // STEPS_PER_PAGE),
        "compared": shown,
        "others": [item for item in runs.all() if item not in shown],
        "zoom": (first, last),
        "latest": rows[-1] if rows else {},
        "signals": sorted(
            {name.removeprefix("signal/") for row in trained[-1:] for name in row if name.startswith("signal/")}
        ),
        "given": dict(given),
    }


def step_page(run: Run, step: int, given: Given) -> Page:
    """A row for each task and role, a cell for each rollout."""
    split = "eval" if given.get("split") == "eval" else "train"
    rollouts = run.rollouts.of_step(step, split)
    rows = run.rows()
    row = next((item for item in rows if item["step"] == step), {})
    if not rollouts and not row:
        raise NotFoundError(f"there is no step {step} in this run")
    tasks: dict[tuple[str, str], list[tuple[Rollout, Any]]] = {}
    roles: dict[str, set[str]] = {}
    for rollout in rollouts:
        roles.setdefault(rollout.task_id, set()).update(path.name for path in rollout.paths)
    for rollout in rollouts:
        for path in rollout.paths:
            tasks.setdefault((rollout.task_id, path.name), []).append((rollout, path))
        for role in () if rollout.paths else sorted(roles[rollout.task_id]) or [""]:
            tasks.setdefault((rollout.task_id, role), []).append((rollout, None))
    groups = list(tasks.items())
    page = whole(given, "page") or 0
    shown = groups[page * ROWS_PER_PAGE : (page + 1) * ROWS_PER_PAGE]
    steps = [int(item["step"]) for item in rows if split == "eval" or is_trained(item)]
    return "step.html", {
        "run": run,
        "step": step,
        "split": split,
        "row": row,
        "groups": shown,
        "questions": {task_id: run.question_of(members[0][0]) for (task_id, _), members in shown},
        "num_groups": len(groups),
        "page": page,
        "num_pages": -(-len(groups) // ROWS_PER_PAGE),
        "num_roles": len({role for _, role in tasks}),
        "has_eval": any(name.startswith("eval/") for name in row),
        "dropped": {name.removeprefix("dropped/"): value for name, value in row.items() if name.startswith("dropped/")},
        "around": neighbours(steps, step),
        "has_batch": split == "train" and run.batch(step) is not None,
    }


def episode_page(run: Run, session_id: str) -> Page:
    """Lanes, calls and rewards, and below them what was said."""
    rollout = rollout_named(run, session_id)
    traces, credits_ = run.calls(session_id)
    return "episode.html", {
        "run": run,
        "rollout": rollout,
        "task": fields_of(run.task_of(rollout)),
        "graph": graph_of(rollout, traces, credits_),
        "leaves": SessionTree(traces).leaves(),
        "has_drift": bool(rollout.drifts) or any(DRIFT_KEY in trace.metadata for trace in traces),
    }


def drifts_page(run: Run, given: Given) -> Page:
    """The rollouts whose prompts drifted, by cause."""
    drifted = [item for item in run.rollouts.all() if item.drifts]
    causes: dict[str, int] = {}
    for rollout in drifted:
        for cause in rollout.drifts:
            causes[cause] = causes.get(cause, 0) + 1
    cause = given.get("cause", "")
    shown = [item for item in drifted if not cause or cause in item.drifts]
    page = whole(given, "page") or 0
    return "drifts.html", {
        "run": run,
        "causes": sorted(causes.items(), key=lambda pair: -pair[1]),
        "cause": cause,
        "rollouts": shown[page * ROWS_PER_PAGE : (page + 1) * ROWS_PER_PAGE],
        "page": page,
        "num_pages": -(-len(shown) // ROWS_PER_PAGE),
    }


def batch_page(run: Run, step: int, given: Given) -> Page:
    """What the optimiser was fed, beside what was sampled."""
    batch = run.batch(step)
    if batch is None:
        raise NotFoundError(
            f"this run has no batch of step {step}: it was deleted (`keep_batches`), or an earlier version trained the run"
        )
    row = next((item for item in run.rows() if item["step"] == step), {})
    page = whole(given, "page") or 0
    truth = truth_of(batch, run.rollouts.of_step(step), run.calls, row)
    steps = [int(item["step"]) for item in run.rows() if is_trained(item)]
    return "batch.html", {
        "run": run,
        "step": step,
        "truth": truth,
        "sequences": truth.sequences[page * ROWS_PER_PAGE : (page + 1) * ROWS_PER_PAGE],
        "page": page,
        "num_pages": -(-len(truth.sequences) // ROWS_PER_PAGE),
        "around": neighbours(steps, step),
    }


def time_page(run: Run, step: int, given: Given) -> Page:
    """A waterfall of the step's rollouts."""
    split = "eval" if given.get("split") == "eval" else "train"
    rollouts = run.rollouts.of_step(step, split)
    if not rollouts:
        raise NotFoundError(f"the store has no rollouts of step {step}")
    by_start = sorted(rollouts, key=lambda item: item.created_at)
    page = whole(given, "page") or 0
    chosen = by_start[page * ROWS_PER_PAGE : (page + 1) * ROWS_PER_PAGE]
    lanes = timeline(chosen, {item.session_id: run.calls(item.session_id)[0] for item in chosen})
    if given.get("sort") == "slowest":
        lanes.sort(key=lambda lane: -lane.seconds)
    steps = [int(item["step"]) for item in run.rows() if is_trained(item)]
    return "time.html", {
        "run": run,
        "step": step,
        "split": split,
        "lanes": lanes,
        "sort": given.get("sort", ""),
        "end": max((lane.stop for lane in lanes), default=0.0),
        "row": next((item for item in run.rows() if item["step"] == step), {}),
        "page": page,
        "num_pages": -(-len(by_start) // ROWS_PER_PAGE),
        "around": neighbours(steps, step),
    }


def rollouts_page(run: Run, given: Given) -> Page:
    """Search and filters."""
    query = Query.of(given)
    offset = whole(given, "offset") or 0
    every, choices = run.rollouts.all(), run.rollouts.choices()
    found = search(every, query, lambda session_id: run.calls(session_id)[0], offset=offset)
    return "rollouts.html", {
        "run": run,
        "query": query,
        "found": found,
        "questions": {item.session_id: run.question_of(item) for item in found.rollouts},
        "offset": offset,
        "num_all": len(every),
        "sorts": list(SORTS),
        "roles": sorted(choices.roles),
        "tools": sorted(choices.tools),
        "badges": sorted(choices.badges),
        "splits": sorted(choices.splits),
    }


def pulse(run: Run) -> dict[str, Any]:
    """What a page asks every now and then, to know whether there is anything new."""
    rows = run.rows()
    return {"state": f"{run.changed_at:.3f}", "live": run.is_live, "step": rows[-1]["step"] if rows else None}
