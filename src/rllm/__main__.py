"""Entry point of the `rllm` command, and of `python -m rllm`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. While its modules are imported, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rllm import cli

    cli.main()


if __name__ == "__main__":
    main()
