"""`python -m rllm`, which is the `rllm` command."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Until all is imported that it needs, Ctrl-C just ends it, with no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rllm import cli

    cli.main()


if __name__ == "__main__":
    main()
