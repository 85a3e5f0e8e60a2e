"""Run a job that is given as JSON, and print its progress and then its costs, each as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

from .jobs import Job


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    import torch

    from .watch import Watch

    torch.set_num_threads(job.threads)
    if job.side == "rllm":
        from .ours import train
    else:
        from .peer import train
    out = sys.stdout
    watch = Watch(job, on_news=lambda news: print(json.dumps({"news": news}), file=out, flush=True))
    with redirect_stdout(sys.stderr):  # trainers print, too
        train(job, watch)
    print(json.dumps(watch.summary()))


if __name__ == "__main__":
    main()
