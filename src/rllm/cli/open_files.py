"""How many files and connections a command may have open: each model call takes two, and agents leave some behind."""

from __future__ import annotations

import errno
from contextlib import suppress

ENOUGH = 65_536
TOO_MANY = {errno.EMFILE, errno.ENFILE}
REMEDY = (
    "too many files and connections are open: an agent that makes a client, a file or a socket in each rollout should close it there, "
    "as `with OpenAI() as client:` does; or allow more (ulimit -n)"
)


def allow_many() -> None:
    """Take what the system grants to whoever asks; shells begin with 1024, for programs of long ago."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    now, granted = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if granted == resource.RLIM_INFINITY else min(granted, ENOUGH)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):  # macOS grants less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, granted))
