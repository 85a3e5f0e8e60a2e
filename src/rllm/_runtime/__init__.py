"""Helpers that every layer may import: files, ids, threads, lazy imports, memory, and bounds on untrusted data."""
