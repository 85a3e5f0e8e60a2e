"""The local web page over runs and trace stores: `rllm view`. It reads SQLite, PostgreSQL and JSON, and writes nothing."""
