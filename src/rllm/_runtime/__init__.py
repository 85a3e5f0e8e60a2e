"""Helpers that every layer may import.

`files` writes durably, `threads` runs blocking functions beside an event loop, `process` handles Ctrl-C, forks and
memory limits, `untrusted` bounds what data from outside may cost, `head_and_tail` bounds output, `network` knows
loopback addresses, and `ids` and `lazy` make random ids and lazy packages.
"""
