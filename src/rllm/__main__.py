"""`python -m rllm` is the `rllm` command."""

from rllm.cli import main

main()
