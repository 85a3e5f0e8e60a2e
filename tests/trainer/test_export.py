import json
import resource
import signal
from pathlib import Path

import peft
import pytest

from rllm.errors import ConfigError
from rllm.inference.local.loading import load_model, save_model
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.export import chat_rows, chosen_checkpoint, export_adapter, export_episodes, export_model
from rllm.types import Episode, Step, Trajectory

ASK = {"role": "user", "content": "How many figs?"}
SEVEN, EIGHT = ({"role": "assistant", "content": text} for text in ("seven", "eight"))
MORE = {"role": "user", "content": "Sure?"}


def episode(*chats: list[dict[str, str]], **fields: object) -> Episode:
    steps = [Step(chat_completions=chat, prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5]) for chat in chats]
    return Episode(task_id="figs@0.0.1", task={"q": 1}, trajectories=[Trajectory(reward=0.5, steps=steps)], **fields)  # type: ignore[arg-type]


def test_conversation_is_exported_as_one_row() -> None:
    found = episode([ASK, SEVEN], [ASK, SEVEN, MORE, EIGHT])
    found.trajectories[0].steps[1].info["tools"] = [{"type": "function"}]
    assert list(chat_rows([found])) == [
        {
            "messages": [ASK, SEVEN, MORE, EIGHT],
            "tools": [{"type": "function"}],
            "task_id": "figs",
            "name": "agent",
            "reward": 0.5,
        }
    ]


def test_separate_calls_are_separate_rows() -> None:
    rows = list(chat_rows([episode([ASK, SEVEN], [MORE, SEVEN, ASK, EIGHT])]))
    assert [row["messages"] for row in rows] == [[ASK, SEVEN], [MORE, {**SEVEN, "weight": 0}, ASK, EIGHT]]


def test_failed_rollout_is_not_exported() -> None:
    assert list(chat_rows([episode([ASK, SEVEN], info={"error": {"type": "AgentError"}})])) == []


def test_untrainable_trajectory_is_not_exported() -> None:
    found = episode([ASK, SEVEN], info={"split": "train"})
    found.trajectories.append(Trajectory(name="opponent", trainable=False, steps=[Step(chat_completions=[ASK, EIGHT])]))
    assert [row["name"] for row in chat_rows([found])] == ["agent"]
    found.info["split"] = "eval"  # of `rllm eval`
    assert [row["name"] for row in chat_rows([found])] == ["agent"]
    found.trajectories[0].trainable = False  # of a training run
    assert [row["name"] for row in chat_rows([found])] == ["agent", "opponent"]


def test_episodes_are_exported_as_lines(tmp_path: Path) -> None:
    found = episode([ASK, SEVEN], session_id="s", info={"split": "train", "training_step": 3})
    assert export_episodes([found], tmp_path / "e.jsonl") == 1
    [line] = (tmp_path / "e.jsonl").read_text().splitlines()
    assert Episode.from_dict(json.loads(line)) == found


def test_other_file_extension_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in .jsonl"):
        export_episodes([], tmp_path / "e.csv")


def run_with(tmp_path: Path, *files: str) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"step": 3}')
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return tmp_path / "run"


def test_exported_model_has_no_trainer_files(tmp_path: Path) -> None:
    more = ("additional_chat_templates/tool_use.jinja", "verl/policy-0.pt")
    run = run_with(tmp_path, "config.json", "model.safetensors", "recovery.pt", "recovery.json", "critic.pt", *more)
    export_model(chosen_checkpoint(run, "latest"), tmp_path / "model")
    kept = ["additional_chat_templates/tool_use.jinja", "config.json", "model.safetensors"]
    found = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path / "model").as_posix() for path in found) == kept
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_model(chosen_checkpoint(run, "step-000003"), tmp_path / "model")
    with pytest.raises(ConfigError, match="has all weights and no adapter"):
        export_adapter(chosen_checkpoint(run, "latest"), tmp_path / "adapter")


def test_cancelled_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")

    def ctrl_c(source: Path, target: Path, **_: object) -> None:
        (target / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copytree", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        export_model(checkpoint, tmp_path / "models" / "mine")
    assert list((tmp_path / "models").iterdir()) == []


def test_unwritable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match=r"rows.jsonl' cannot be written \(Not a directory\): choose another path"):
        export_episodes([episode([ASK, SEVEN])], tmp_path / "file" / "deep" / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"model' cannot be written \(Not a directory\): choose another path"):
        export_model(tmp_path / "checkpoint", tmp_path / "file" / "model")


def test_full_disk_is_reported(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a fig"], vocab_size=300)
    model = new_model(tokenizer, TinyPolicyRecipe(hidden_size=32, num_layers=1))
    save_model(model, tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    loaded = load_model(tmp_path / "base", device="cpu").model
    peft.get_peft_model(loaded, peft.LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"merged' cannot be written \(.*: choose another path"):
            export_model(tmp_path / "adapter", tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    with pytest.raises(ConfigError, match="has step-000003; name one of them, or latest"):
        chosen_checkpoint(run, "step-000009")
    with pytest.raises(ConfigError, match=r"checkpoint='best': none has a score, which keep_best gives; .* or latest"):
        chosen_checkpoint(run, "best")
    with pytest.raises(ConfigError, match="no such folder; use the folder of a training run: "):
        chosen_checkpoint(tmp_path / "nothing", "latest")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="it has no checkpoints; use the folder of a training run: "):
        chosen_checkpoint(tmp_path / "empty", "latest")
