"""Helpers that every layer may import.

`files` writes durably, `threads` runs blocking functions beside an event loop, `process` handles Ctrl-C, forks and
memory limits, `supervisor` ends programs with all that they started, `untrusted` bounds what data from outside may
cost, and `ids` and `lazy` make random ids and lazy packages.
"""
