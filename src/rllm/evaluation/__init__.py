"""Evaluation of an agent on a dataset: accuracy, pass@k, cost and failures.

`evaluate` rolls out what is missing, `folder` keeps episodes and report on disk and compares two evaluations, `report`
has outcomes and their report, and `pass_at_k` the estimates with confidence intervals.
"""
