"""What `docs/trackers.md` says is so."""

import re
import shlex
from pathlib import Path

from rllm.tracking import EXTRAS, TRACKERS
from rllm.trainer.config import load_config

PAGE = Path(__file__).parents[2].joinpath("docs", "trackers.md").read_text()


def test_the_table_has_every_tracker_and_its_extra() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`rllm\[(\w+)\]`)?", PAGE, re.MULTILINE))
    assert rows == {name: name if name in EXTRAS else "" for name in TRACKERS}


def test_the_command_sets_what_it_says() -> None:
    [block] = re.findall(r"```shell\n(.*?)```", PAGE, re.DOTALL)
    config = load_config([word for word in shlex.split(block) if "=" in word])
    assert (config.trackers, config.project) == (["jsonl", "console", "wandb"], "shop")
