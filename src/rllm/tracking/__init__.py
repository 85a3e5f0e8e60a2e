"""Where a run's metrics go: several places at once, none of which can stop the run."""

TRACKERS = {
    "console": "rllm.tracking.console:ConsoleTracker",
    "jsonl": "rllm.tracking.jsonl:JSONLTracker",
}
"""Short names for `trackers`; any `package.module:Class` does as well."""
