"""The names and the command of `docs/trackers.md` exist."""

import re
import shlex
from pathlib import Path

from rllm.tracking import EXTRAS, TRACKERS
from rllm.trainer.config import load_config

PAGE = Path(__file__).parents[2].joinpath("docs", "trackers.md").read_text()


def test_table_has_every_tracker_and_its_extra() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`rllm\[(\w+)\]`)?", PAGE, re.MULTILINE))
    assert rows == {name: name if name in EXTRAS else "" for name in TRACKERS}


def test_documented_command_has_the_stated_settings() -> None:
    [block] = re.findall(r"```shell\n(.*?)```", PAGE, re.DOTALL)
    config = load_config([word for word in shlex.split(block) if "=" in word])
    assert (config.trackers, config.project) == (["jsonl", "console", "wandb"], "shop")
