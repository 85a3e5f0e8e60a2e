"""Tasks: reading and registering datasets, and the order in which they are trained on.

* `dataset`: a list of tasks, datasets kept by name and split, and the tasks of a training step. Read this first.
* `sources`: files, folders, the Hugging Face hub and functions to rows.
* `rows`: Python objects and Arrow tables to plain dicts.
* `benchmarks`: benchmarks by name: their datasets, questions and scorers; `benchmark_rows` has the schemas.
* `generated`: random tasks.
* `prepare`: known datasets, to be registered; `python -m rllm.data.prepare NAME`.
"""

from rllm.data.dataset import Dataset as Dataset
from rllm.data.dataset import DatasetRegistry as DatasetRegistry
