"""Trackers of a run's metrics: several at once, none of which can stop the run.

`base` has the protocol, the fan-out and the record that every run has (`metrics.jsonl`), `console` the lines
on a terminal, `trackers` TensorBoard, W&B, MLflow and trackio. `about` reads a run's name, settings and ids, and
decides which run folders are the user's own; `samples` picks conversations to show.
"""

TRACKERS = {
    "console": "rllm.tracking.console:ConsoleTracker",
    "jsonl": "rllm.tracking.base:JSONLTracker",
    "tensorboard": "rllm.tracking.trackers:TensorBoardTracker",
    "wandb": "rllm.tracking.trackers:WandbTracker",
    "mlflow": "rllm.tracking.trackers:MLflowTracker",
    "trackio": "rllm.tracking.trackers:TrackioTracker",
}
"""Short names for `trackers`; any `package.module:Class` works as well."""

RECORD = "jsonl"
"""The tracker that every run has."""

EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Trackers that need a package of the same name, which an extra of that name installs."""
