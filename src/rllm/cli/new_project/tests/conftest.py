"""So that the tests find `agent.py`, wherever they are started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
