"""One thread for each process's tensors: tiny models gain nothing from more, and on a busy machine they lose a lot."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
