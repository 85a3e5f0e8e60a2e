"""Evaluation of an agent on a dataset: accuracy, pass@k, cost and failures.

`evaluate` rolls out what is missing, `folder` keeps episodes and report on disk, `report` has outcomes and their
report, `pass_at_k` the estimates with confidence intervals, and `compare` the difference between two evaluations.
"""
