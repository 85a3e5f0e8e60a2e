"""Tasks: reading and registering datasets, and the order in which they are trained on.

* `dataset`: a list of tasks. Read this first.
* `sources`, `files`: from files, folders, the Hugging Face hub and functions to rows.
* `rows`: from Python objects and Arrow tables to plain dicts.
* `registry`: datasets kept by name and split.
* `order`: the tasks of a training step.
* `prepare`, and `python -m rllm.data.prepare_...`: known datasets, generated or from the hub.
"""

from rllm.data.dataset import Dataset as Dataset
from rllm.data.registry import DatasetRegistry as DatasetRegistry
