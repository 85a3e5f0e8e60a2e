"""Evaluation of an agent on a dataset: accuracy, pass@k, cost and failures.

`evaluate` rolls out what is missing, `folder` keeps episodes and report on disk and compares two evaluations, and
`report` has outcomes and their report, with confidence intervals.
"""
