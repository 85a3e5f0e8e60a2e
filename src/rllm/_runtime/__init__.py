"""Helpers that every layer may import.

`files` writes durably, `threads` runs blocking functions alongside an event loop, `process` handles Ctrl-C, forks
and memory limits, `supervisor` ends programs with all that they started, `untrusted` limits the memory that data from
outside may take, `ids` makes random ids, and `lazy` loads the names of a package on first use.
"""
