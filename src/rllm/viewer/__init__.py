"""Local web pages over runs and trace stores: `rllm view`. It reads SQLite, PostgreSQL and JSON, and writes nothing.

`runs` finds runs and stores, `rollouts` lists and `search` filters their rollouts, `metrics` and `batches` read a run's
files. `pages` collects what each page shows, with `charts`, `graph`, `timeline`, `tokens`, `token_text`, `messages` and
`batch_audit`; `render` and `templates` draw it. `app` serves the pages, `security` guards them, and `export` writes a
run as one HTML file. Read `pages` first.
"""
