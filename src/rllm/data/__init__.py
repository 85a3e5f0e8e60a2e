"""Tasks: reading and registering datasets, and the order in which they are trained on.

* `dataset`: a list of tasks, and datasets registered by name and split. Read this first.
* `sampling`: the tasks of a training step.
* `sources`: files, folders, the Hugging Face hub and functions to rows.
* `rows`: Python objects and Arrow tables to plain dicts.
* `benchmarks`: benchmarks by name: their datasets, questions and scorers; `benchmark_rows` makes their tasks.
* `prepare`: known datasets, to be registered; `python -m rllm.data.prepare NAME`.
"""

from rllm.data.dataset import Dataset as Dataset
from rllm.data.dataset import DatasetRegistry as DatasetRegistry
