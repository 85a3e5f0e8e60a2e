"""Where a run's metrics go: several places at once, none of which can stop the run."""

TRACKERS = {
    "console": "rllm.tracking.console:ConsoleTracker",
    "jsonl": "rllm.tracking.jsonl:JSONLTracker",
    "tensorboard": "rllm.tracking.tensorboard:TensorBoardTracker",
    "wandb": "rllm.tracking.wandb:WandbTracker",
    "mlflow": "rllm.tracking.mlflow:MLflowTracker",
    "trackio": "rllm.tracking.trackio:TrackioTracker",
}
"""Short names for `trackers`; any `package.module:Class` does as well."""

RECORD = "jsonl"
"""The tracker that every run has."""

EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio")
"""The trackers that need a package of the same name, which an extra of that name installs."""
