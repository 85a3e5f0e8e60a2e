"""Program that writes the readings of the package harbor: run it with Python 3.12 in an environment with harbor 0.26.0.

pip install harbor==0.26.0 && python tests/tasks/harbor_readings.py > tests/tasks/harbor_readings.json
"""

import json
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

TOMLS = [
    "",
    'version = "1.0"\n[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 30\n',
    'schema_version = "1.4"\n[task]\nname = "acme/one"\n[environment]\ncpus = 2\nmemory_mb = 512\nstorage_mb = 1024\n',
    '[environment]\nmemory = "2G"\nstorage = "512M"\nbuild_timeout_sec = 90\n',
    '[environment]\nmemory = "1.5g"\ncpus = 0.5\n',
    '[environment]\nmemory = "2 apples"\n',
    '[environment]\ndocker_image = "debian:bookworm"\nworkdir = "/work"\nenv = { A = "1" }\n',
    '[verifier]\nenv = { B = "2" }\nenvironment_mode = "separate"\n[solution]\nenv = { C = "3" }\n',
    '[verifier]\ntimeout_sec = "soon"\n',
    "[agent]\ntimeout_sec = [1]\n",
    "[environment]\ncpus = nan\n",
    "[environment]\nmemory_mb = 1.5\n",
    'artifacts = ["/etc/hosts", { source = "/var/data" }]\n',
    'artifacts = ["/data/../etc"]\n',
    "[environment]\nunknown = 1\n[unknown]\na = 1\n",
    "[environment\n",
    'environment = "podman"\n',
    '[environment]\nos = "Linux"\n',
    '[environment]\nos = "plan9"\n',
    '[verifier]\nenvironment_mode = "alone"\n',
]
REWARDS = [
    ("reward.txt", text)
    for text in ("1", "0.5\n", " 1 ", "-2", "1e3", "", "nan", "inf", "-inf", "yes", "1 2", "1,5", "0x1", "1e999")
] + [
    ("reward.json", text)
    for text in ("1", "0.5", '{"reward": 1}', '{"a": 0.25, "b": 0.5}', '{"a": NaN}', '{"a": "1"}', "[1]", "null", "{")
]
INSTRUCTIONS = ["Do it.\n", "<!-- canary 1 -->\n# canary GUID\n\nDo it.\n", "\nDo it.\n# canary below\n"]


def toml_reading(text):
    from harbor.models.task.config import TaskConfig

    try:
        config = TaskConfig.model_validate_toml(text)
    except ValueError:
        return None
    sources = [item if isinstance(item, str) else item.source for item in config.artifacts]
    return {
        "name": config.task and config.task.name,
        "agent_timeout_s": config.agent.timeout_sec,
        "verifier_timeout_s": config.verifier.timeout_sec,
        "build_timeout_s": config.environment.build_timeout_sec,
        "cpus": config.environment.cpus,
        "memory_mb": config.environment.memory_mb,
        "disk_mb": config.environment.storage_mb,
        "image": config.environment.docker_image,
        "workdir": config.environment.workdir,
        "env": config.environment.env,
        "verifier_env": config.verifier.env,
        "solution_env": config.solution.env,
        "artifacts": sources,
    }


def reward_reading(name, text):
    from harbor.verifier.verifier import Verifier

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text(text)
        trial = SimpleNamespace(trial_paths=SimpleNamespace(reward_text_path=path, reward_json_path=path))
        read = Verifier._parse_reward_text if name == "reward.txt" else Verifier._parse_reward_json
        try:
            return read(trial)
        except Exception:
            return None


def main():
    from harbor.models.task.task import strip_canary

    warnings.simplefilter("ignore")
    readings = {
        "harbor": version("harbor"),
        "toml": [{"text": text, "read": toml_reading(text)} for text in TOMLS],
        "rewards": [{"name": name, "text": text, "read": reward_reading(name, text)} for name, text in REWARDS],
        "instructions": [{"text": text, "read": strip_canary(text)} for text in INSTRUCTIONS],
    }
    sys.stdout.write(json.dumps(readings, indent=1) + "\n")


if __name__ == "__main__":
    main()
