"""Contents of each page: a run and a query to the values that a template draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rllm.capture import SessionTree
from rllm.errors import ConfigError
from rllm.parser.append_only import common_length
from rllm.types import DRIFT_KEY, JSONObject, Trace
from rllm.viewer import charts
from rllm.viewer.batches import audit_batch
from rllm.viewer.charts import is_trained, neighbours
from rllm.viewer.graph import graph_of, timeline
from rllm.viewer.rollouts import SORTS, PathOutcome, Query, StoredRollout, search
from rllm.viewer.runs import HOW_TO_MAKE_ONE, Run, Runs
from rllm.viewer.texts import fields_of
from rllm.viewer.tokens import OVERLAYS, SCALES, TokenTable, drifts_of, token_table

Page: TypeAlias = tuple[str, JSONObject]
"""Name of a template, and its values."""
QueryArgs: TypeAlias = Mapping[str, str]
"""A query string."""


class NotFoundError(LookupError):
    """Missing page; the message names the missing part."""


def rollout_named(run: Run, session_id: str) -> StoredRollout:
    """Return the rollout of a session."""
    found = run.rollouts.get(session_id)
    if found is None:
        raise NotFoundError(
            f"there is no session {session_id!r} in the store: it was deleted, or a resumed run repeated it"
        )
    return found


def trace_named(run: Run, session_id: str, trace_id: str) -> Trace:
    """Return a call of a session; without an id the end of its first sequence."""
    traces = run.calls(session_id)[0]
    choices = traces if trace_id else SessionTree(traces).leaves()
    found = next((trace for trace in choices if trace_id in (trace.id, "")), None)
    if found is None:
        raise NotFoundError(f"there is no call {trace_id!r} in session {session_id!r}")
    return found


def table_of(run: Run, rollout: StoredRollout, trace: Trace) -> TokenTable:
    """Return the tokens of a call and of those before it, with data from the store and the batches."""
    traces, credits_ = run.calls(rollout.session_id)
    batch = run.batch(rollout.step) if rollout.split == "train" and rollout.step else None
    return token_table(trace, traces, credits_, batch)


def whole(given: QueryArgs, name: str) -> int | None:
    """Return a whole number of the query, if it is given."""
    text = given.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{name}={text!r}: use a whole number")
    return int(text)


ROWS_PER_PAGE = 100
STEPS_PER_PAGE = 200
T = TypeVar("T")


def _paged(items: Sequence[T], given: QueryArgs, size: int = ROWS_PER_PAGE) -> tuple[Sequence[T], JSONObject]:
    """Return the items of the page in the query, and the values from which a template draws links to others."""
    page = whole(given, "page") or 0
    return items[page * size : (page + 1) * size], {"page": page, "num_pages": -(-len(items) // size)}


def _of_step(run: Run, step: int, *, evaluations: bool = False) -> JSONObject:
    """Return the values that all pages of a step show: its metrics, and the steps before and after it."""
    rows = run.rows()
    steps = [int(item["step"]) for item in rows if evaluations or is_trained(item)]
    row = next((item for item in rows if item["step"] == step), {})
    return {"run": run, "step": step, "row": row, "around": neighbours(steps, step)}


_MAX_COMPARED = 4
"""Runs in one chart."""


def home(runs: Runs) -> Page:
    """List the runs, most recently changed first."""
    rows = [(run, run.rows()) for run in runs.all()]
    return "home.html", {"runs": rows, "how": HOW_TO_MAKE_ONE, "run": None}


def run_page(run: Run, runs: Runs, given: QueryArgs) -> Page:
    """Show charts and steps."""
    others = [found for name in given.get("with", "").split(",") if name and (found := runs.get(name)) is not None]
    shown = [run, *[other for other in others if other is not run][: _MAX_COMPARED - 1]]
    first, last = whole(given, "from"), whole(given, "to")
    rows = run.rows()
    trained = [row for row in rows if is_trained(row)]
    limits = [run.setting("rollout", "max_staleness")]
    limits += [run.setting("data", "replay_steps")] if run.setting("data", "replay") else []
    newest = [
        row
        for row in reversed(rows)
        if (first is None or row["step"] >= first) and (last is None or row["step"] <= last)
    ]
    page_rows, paging = _paged(newest, given, STEPS_PER_PAGE)
    return "run.html", {
        "run": run,
        "charts": charts.charts_of([(item.name, item.rows()) for item in shown], first=first, last=last),
        "lights": charts.sync_status(trained, max_staleness=sum(limit for limit in limits if isinstance(limit, int))),
        "rows": page_rows,
        **paging,
        "compared": shown,
        "others": [item for item in runs.all() if item not in shown],
        "zoom": (first, last),
        "latest": rows[-1] if rows else {},
        "signals": sorted(
            {name.removeprefix("signal/") for row in trained[-1:] for name in row if name.startswith("signal/")}
        ),
        "given": dict(given),
    }


def step_page(run: Run, step: int, given: QueryArgs) -> Page:
    """Show a row for each task and role, a cell for each rollout."""
    split = "eval" if given.get("split") == "eval" else "train"
    rollouts = run.rollouts.of_step(step, split)
    common = _of_step(run, step, evaluations=split == "eval")
    row = common["row"]
    if not rollouts and not row:
        raise NotFoundError(f"there is no step {step} in this run")
    tasks: dict[tuple[str, str], list[tuple[StoredRollout, PathOutcome | None]]] = {}
    roles: dict[str, set[str]] = {}
    for rollout in rollouts:
        roles.setdefault(rollout.task_id, set()).update(path.name for path in rollout.paths)
    for rollout in rollouts:
        for path in rollout.paths:
            tasks.setdefault((rollout.task_id, path.name), []).append((rollout, path))
        for role in () if rollout.paths else sorted(roles[rollout.task_id]) or [""]:
            tasks.setdefault((rollout.task_id, role), []).append((rollout, None))
    shown, paging = _paged(list(tasks.items()), given)
    return "step.html", {
        **common,
        **paging,
        "split": split,
        "groups": shown,
        "questions": {task_id: run.question_of(members[0][0]) for (task_id, _), members in shown},
        "num_groups": len(tasks),
        "num_roles": len({role for _, role in tasks}),
        "has_eval": any(name.startswith("eval/") for name in row),
        "dropped": {name.removeprefix("dropped/"): value for name, value in row.items() if name.startswith("dropped/")},
        "has_batch": split == "train" and run.batch(step) is not None,
    }


def episode_page(run: Run, session_id: str) -> Page:
    """Show lanes, calls and rewards, and the messages below."""
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


def drifts_page(run: Run, given: QueryArgs) -> Page:
    """List rollouts with drifted prompts, by cause."""
    drifted = [item for item in run.rollouts.all() if item.drifts]
    causes = Counter(cause for rollout in drifted for cause in rollout.drifts)
    cause = given.get("cause", "")
    shown, paging = _paged([item for item in drifted if not cause or cause in item.drifts], given)
    return "drifts.html", {"run": run, "causes": causes.most_common(), "cause": cause, "rollouts": shown, **paging}


def batch_page(run: Run, step: int, given: QueryArgs) -> Page:
    """Show the optimizer's batch alongside the sampled tokens."""
    batch = run.batch(step)
    if batch is None:
        raise NotFoundError(f"this run has no batch of step {step}: it was deleted (see `keep_batches`), or never kept")
    common = _of_step(run, step)
    audit = audit_batch(batch, run.rollouts.of_step(step), run.calls, common["row"])
    sequences, paging = _paged(audit.sequences, given)
    return "batch.html", {**common, **paging, "audit": audit, "sequences": sequences}


def time_page(run: Run, step: int, given: QueryArgs) -> Page:
    """Show a waterfall of the step's rollouts."""
    split = "eval" if given.get("split") == "eval" else "train"
    rollouts = run.rollouts.of_step(step, split)
    if not rollouts:
        raise NotFoundError(f"the store has no rollouts of step {step}")
    chosen, paging = _paged(sorted(rollouts, key=lambda item: item.created_at), given)
    lanes = timeline(chosen, {item.session_id: run.calls(item.session_id)[0] for item in chosen})
    if given.get("sort") == "slowest":
        lanes.sort(key=lambda lane: -lane.seconds)
    return "time.html", {
        **_of_step(run, step),
        **paging,
        "split": split,
        "lanes": lanes,
        "sort": given.get("sort", ""),
        "end": max((lane.stop for lane in lanes), default=0.0),
    }


def rollouts_page(run: Run, given: QueryArgs) -> Page:
    """Show search and filters."""
    query = Query.of(given)
    offset = whole(given, "offset") or 0
    every = run.rollouts.all()
    found = search(every, query, lambda session_id: run.calls(session_id)[0], offset=offset)
    return "rollouts.html", {
        "run": run,
        "query": query,
        "found": found,
        "questions": {item.session_id: run.question_of(item) for item in found.rollouts},
        "offset": offset,
        "num_all": len(every),
        "sorts": list(SORTS),
        **run.rollouts.choices(),
    }


def pulse(run: Run) -> JSONObject:
    """Return the state that pages poll to find new data."""
    rows = run.rows()
    return {"state": f"{run.changed_at:.3f}", "live": run.is_live, "step": rows[-1]["step"] if rows else None}


_TOKENS_PER_PAGE = 256
_MAX_SIDE_BY_SIDE = 16
"""Rollouts of one task on a page."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Column of a group: the part of a rollout with one role."""

    rollout: StoredRollout
    num_calls: int
    leaf: Trace | None
    """End of its first sequence; `None` if it sampled nothing."""
    table: TokenTable | None
    num_more: int
    """Number of its other sequences, which are not shown."""


def group_page(run: Run, task_id: str, given: QueryArgs) -> Page:
    """Show the rollouts of a task and role side by side, from the first differing token."""
    step = whole(given, "step")
    rollouts = run.rollouts.of_task(task_id, given.get("split"), step)
    if not rollouts:
        raise NotFoundError(f"there is no rollout of the task {task_id!r} in this run")
    roles = list(dict.fromkeys(path.name for rollout in rollouts for path in rollout.paths))
    role = given.get("role") or next(iter(roles), "")
    columns = [_column(run, rollout, role) for rollout in rollouts[:_MAX_SIDE_BY_SIDE]]
    spoken = [column.table.ids for column in columns if column.table]
    if len(spoken) > 1:
        shared = min(common_length(spoken[0], other) for other in spoken[1:])
    else:
        shared = next((len(column.leaf.prompt_ids) for column in columns if column.leaf), 0)
    return "group.html", {
        "run": run,
        "task_id": task_id,
        "step": rollouts[0].step,
        "split": rollouts[0].split,
        "columns": columns,
        "roles": roles,
        "role": role,
        "num_hidden": len(rollouts) - len(columns),
        "shared": shared,
        "shared_ids": spoken[0][:shared] if spoken else [],
        "vocabulary": run.vocabulary,
    }


def tokens_page(run: Run, session_id: str, given: QueryArgs) -> Page:
    """Show all known values of each token of a sequence: the one that ends with the query's call, or the first."""
    rollout, trace = rollout_named(run, session_id), trace_named(run, session_id, given.get("call", ""))
    traces, _ = run.calls(session_id)
    overlay = given.get("overlay") or "mask"
    if overlay not in OVERLAYS:
        raise ConfigError(f"overlay={overlay!r}: use one of {', '.join(OVERLAYS)}")
    table = table_of(run, rollout, trace)
    start = max(min(whole(given, "from") or 0, max(len(table) - 1, 0)), 0)
    as_table = given.get("view") == "table"
    return "tokens.html", {
        "run": run,
        "rollout": rollout,
        "trace": trace,
        "leaves": SessionTree(traces).leaves(),
        "table": table,
        "overlay": overlay,
        "as_table": as_table,
        "start": start // _TOKENS_PER_PAGE * _TOKENS_PER_PAGE if as_table else start,
        "per_page": _TOKENS_PER_PAGE,
        "legend": legend(overlay),
        "vocabulary": run.vocabulary,
    }


def tokens_data(run: Run, session_id: str, given: QueryArgs) -> JSONObject:
    """Return all values of a sequence, for the script that shows them under the pointer."""
    rollout, trace = rollout_named(run, session_id), trace_named(run, session_id, given.get("call", ""))
    table, vocabulary = table_of(run, rollout, trace), run.vocabulary
    known = {str(token_id): text for token_id in set(table.ids) if (text := vocabulary.hex_of(token_id))}
    return {
        "ids": table.ids,
        "bytes": known,
        "spans": [list(span) for span in table.spans],
        "clip": table.clip,
        "columns": {
            name: [None if value is None else float(f"{value:.6g}") for value in column]
            for name, column in table.columns.items()
            if any(value is not None for value in column)
        },
    }


def drift_page(run: Run, session_id: str) -> Page:
    """Show the prompts of a rollout that differ from earlier tokens."""
    rollout = rollout_named(run, session_id)
    traces, _ = run.calls(session_id)
    return "drift.html", {"run": run, "rollout": rollout, "drifts": drifts_of(traces), "vocabulary": run.vocabulary}


def legend(overlay: str) -> list[tuple[str, str]]:
    """Return the classes of an overlay with their meanings."""
    if overlay == "mask":
        return [("", "prompt, or inserted"), ("m1", "sampled, not trained on"), ("m2", "sampled and trained on")]
    if overlay == "version":
        return [("v0", "version 0, 6, …"), *((f"v{number}", f"{number}, {number + 6}, …") for number in range(1, 6))]
    if overlay in ("sampler", "trainer"):
        bounds = SCALES["sampler"].bounds
        return [
            ("s0", f"above {-bounds[0]:g}"),
            *((f"s{place}", f"to {-bound:g}") for place, bound in enumerate(bounds[1:], start=1)),
            (f"s{len(bounds)}", "less"),
        ]
    scale = SCALES[overlay]
    if not scale.diverges:
        return [
            *((f"s{place}", f"up to {bound:g}") for place, bound in enumerate(scale.bounds)),
            (f"s{len(scale.bounds)}", "more"),
        ]
    middle = 1.0 if overlay == "ratio" else 0.0
    ends = scale.bounds[1:]
    below = [(f"d-{place}", f"{middle - bound:g}") for place, bound in reversed(list(enumerate(ends, start=1)))]
    above = [(f"d{place}", f"{middle + bound:g}") for place, bound in enumerate(ends, start=1)]
    return [*below, ("d0", f"{middle:g}"), *above]


def _column(run: Run, rollout: StoredRollout, role: str) -> Column:
    traces, _ = run.calls(rollout.session_id)
    own = {step.id for path in rollout.paths if path.name == role for step in path.steps}
    ends = SessionTree([trace for trace in traces if trace.id in own or not own]).leaves()
    leaf = ends[0] if ends else None
    return Column(
        rollout=rollout,
        num_calls=len(traces),
        leaf=leaf,
        table=table_of(run, rollout, leaf) if leaf else None,
        num_more=max(len(ends) - 1, 0),
    )
