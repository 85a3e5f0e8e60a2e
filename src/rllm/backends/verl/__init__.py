"""Training on verl's Ray workers: the only package that knows verl.

`backend.py` drives the workers. `settings.py` translates settings to verl's keys, `worker_config.py` checks and
composes them. `cluster.py` starts the workers on a Ray cluster and calls them with a deadline; `worker.py` runs in
them. `rows.py` turns a batch into verl's rows and back, with the losses on them. `platform_cpu.py` lets verl train
without GPUs.
"""
