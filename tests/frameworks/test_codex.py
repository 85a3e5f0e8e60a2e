import sys

import pytest

from rllm.sdk import run_program
from rllm.testing import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from .proof import Variant
from .rollouts import Framework
from .shell import called, copying
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="codex", package="@openai/codex")
SHELL = Speech(call=lambda prompt, arguments: called("exec_command", {"cmd": copying(arguments)}))
VARIANTS = [Variant(way="exec", endpoint="responses", streaming=True, speech=SHELL)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)


def test_rllm_run_explains_why_calls_of_codex_without_provider_never_arrive(tmp_path):
    with ScriptedServer(ScriptedEngine(["hello"])) as server:
        options = ["--upstream", server.base_url, "--timeout", "5"]
        command = ["codex", "exec", "--skip-git-repo-check", "hi"]
        done = run_program(
            [sys.executable, "-m", "rllm", "run", *options, "--", *command],
            cwd=tmp_path,
            env={"HOME": str(tmp_path), **FRAMEWORK.variables},
        )
    assert done.exit_code != 0
    assert "made no model call that reached the gateway" in done.stderr
    assert "CODEX_HOME" in done.stderr
