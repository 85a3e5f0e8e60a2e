"""The pages on which tokens are read: of one sequence, of rollouts side by side, and where a prompt departs from what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rllm.capture import SessionTree
from rllm.errors import ConfigError
from rllm.types import Trace
from rllm.viewer.drift import drifts_of, num_alike
from rllm.viewer.lookup import Given, NotFoundError, Page, rollout_named, table_of, trace_named, whole
from rllm.viewer.rollouts import Rollout
from rllm.viewer.runs import Run
from rllm.viewer.tokens import OVERLAYS, SCALES, TokenTable

_TOKENS_PER_PAGE = 256
_MAX_SIDE_BY_SIDE = 16
"""Rollouts of one task on a page."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One rollout of a group, as far as it is of one role."""

    rollout: Rollout
    num_calls: int
    leaf: Trace | None
    """The end of its first sequence; `None`: it sampled nothing."""
    table: TokenTable | None
    num_more: int
    """Its other sequences, which are not shown."""


def group_page(run: Run, task_id: str, given: Given) -> Page:
    """The rollouts of a task and role side by side, from the first token at which they part."""
    step = whole(given, "step")
    rollouts = run.rollouts.of_task(task_id, given.get("split"), step)
    if not rollouts:
        raise NotFoundError(f"there is no rollout of the task {task_id!r} in this run")
    roles = list(dict.fromkeys(path.name for rollout in rollouts for path in rollout.paths))
    role = given.get("role") or next(iter(roles), "")
    columns = [_column(run, rollout, role) for rollout in rollouts[:_MAX_SIDE_BY_SIDE]]
    spoken = [column.table.ids for column in columns if column.table]
    if len(spoken) > 1:
        shared = min(num_alike(spoken[0], other) for other in spoken[1:])
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


def tokens_page(run: Run, session_id: str, given: Given) -> Page:
    """A sequence, which ends with the call of the query, or else is the rollout's first, with what is known of each token."""
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


def tokens_data(run: Run, session_id: str, given: Given) -> dict[str, Any]:
    """Every value of a sequence, for the script that shows them under the pointer."""
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
    """The prompts of a rollout that depart from what was sampled."""
    rollout = rollout_named(run, session_id)
    traces, _ = run.calls(session_id)
    return "drift.html", {"run": run, "rollout": rollout, "drifts": drifts_of(traces), "vocabulary": run.vocabulary}


def legend(overlay: str) -> list[tuple[str, str]]:
    """Classes of an overlay with what they stand for."""
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


def _column(run: Run, rollout: Rollout, role: str) -> Column:
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
