"""What a program did in its session: as an episode, in a few lines for a person, or why there is nothing to tell."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath

from rllm.capture import side_calls
from rllm.engine.complete import complete
from rllm.engine.runner import Attempt
from rllm.errors import counted
from rllm.sdk.frameworks import hints_for
from rllm.sdk.supervised import ProgramResult
from rllm.types import DRIFT_KEY, Episode, TerminationReason, Trace, Trajectory


def episode_of(session: str, command: Sequence[str], done: ProgramResult, traces: Sequence[Trace]) -> Episode:
    """One trajectory, unscored, of the calls of its task; `info["program"]` says how the program ended and what it printed."""
    ordered = sorted(traces, key=lambda trace: trace.started_at)
    task = {"program": PurePath(command[0]).name}  # its arguments may hold secrets
    attempt = Attempt(task=task, task_id=session, session_id=session, split="run", tokens_required=False)
    episode = complete(Episode(trajectories=[Trajectory()]), attempt, ordered)
    episode.info["program"] = asdict(done)
    episode.termination_reason = TerminationReason.TIMEOUT if done.timed_out else None
    return episode


def summary(episode: Episode, traces: Sequence[Trace], done: ProgramResult, *, store: str | None) -> str:
    """A line on what was captured, and one for all that is worth knowing besides; `store` is where the traces are, if here."""
    steps = episode.trajectories[0].steps
    num_prompt = sum(len(step.prompt_ids) for step in steps)
    num_sampled = sum(len(step.response_ids) for step in steps)
    lines = [
        f"rllm run: {counted(len(steps), 'call')} in session {episode.session_id}, {num_prompt} prompt and {num_sampled} "
        f"sampled tokens; it {_ending(done)}",
        *_about_calls(traces),
    ]
    if done.num_dropped_bytes:
        lines.append(f"  output     {done.num_dropped_bytes} bytes are left out: --max-output is how much is kept")
    if done.num_killed:
        lines.append(f"  killed     {counted(done.num_killed, 'process', 'processes')} that had not ended")
    return "\n".join([*lines, *_place(episode.session_id, store)])


def interrupted(session: str, *, store: str | None) -> str:
    """What is kept of a program that was ended by Ctrl-C, or a signal that means the same."""
    return "\n".join([f"rllm run: stopped; its calls are kept in session {session}", *_place(session, store)])


def _place(session: str, store: str | None) -> list[str]:
    if store is None:
        return []
    return [f"  traces     {shlex.join(['rllm', 'traces', 'show', session, '--store', store])}"]


def _about_calls(traces: Sequence[Trace]) -> list[str]:
    aside = side_calls(traces)
    reasons = Counter(aside.values())
    drifts = Counter(str(trace.metadata[DRIFT_KEY]) for trace in traces if DRIFT_KEY in trace.metadata)
    errors = Counter(trace.error for trace in traces if trace.error)
    lines = []
    if aside:
        lines.append(f"  left out   {counted(len(aside), 'side call')} ({_each(reasons)})")
    if drifts:
        lines.append(
            f"  drift      {counted(sum(drifts.values()), 'call')} not on the tokens before it ({_each(drifts)})"
        )
    if errors:
        lines.append(f"  no tokens  {counted(sum(errors.values()), 'call')}: {next(iter(errors))}")
    return lines


def _ending(done: ProgramResult) -> str:
    how = "was stopped, its time being up," if done.timed_out else f"ended with exit code {done.exit_code}"
    return f"{how} after {done.duration_s:.1f} s"


def _each(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())


def why_no_calls(command: Sequence[str], base_url: str, done: ProgramResult) -> str:
    """The message for a program none of whose calls arrived."""
    remedies = [
        *hints_for(modules=(), programs=[PurePath(item).name for item in command]),
        f"make it read OPENAI_BASE_URL or OPENAI_API_BASE ({base_url}), or ANTHROPIC_BASE_URL "
        f"({base_url.removesuffix('/v1')}), which it was given",
        "make it send OPENAI_API_KEY, which it was given for its session",
        "--allow-no-calls if it rightly calls no model",
    ]
    problem = f"{command[0]} {_ending(done)} and made no model call that reached the gateway in its session"
    return f"{problem}: {'; '.join(remedies)}"
