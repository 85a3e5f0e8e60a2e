"""Vocabulary of the rLLM framework: its module paths, its configuration keys and a few classes of its own.

`import_hook` resolves module paths that moved and explains those that were removed. The other modules hold what only
programs written for that framework use. Nothing else in the package imports them by name.
"""
