"""Local web pages over runs and trace stores: `rllm view`. It reads SQLite, PostgreSQL and JSON, and writes nothing.

`runs` finds runs and stores, `rollouts` lists and filters their rollouts, `charts` and `batches` read a run's files.
`pages` collects what each page shows, with `graph` (also the timeline), `tokens` and `texts`; `render` and `templates`
draw it. `app` serves the pages and guards them, `export` writes a run as one HTML file, and `explain` reads one episode
for `rllm explain`. Read `pages` first.
"""
