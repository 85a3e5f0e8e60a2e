"""Checks of this machine, the installed packages and a model before training."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rllm._runtime.process import free_memory, total_memory
from rllm.config.sampling import is_neutral
from rllm.errors import ConfigError
from rllm.gateway.server import bind
from rllm.inference.servers.capabilities import Checks, Finding, probe
from rllm.tracking.about import nearest_folder, why_unwritable
from rllm.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rllm.parser.chat_template import ChatTemplate
    from rllm.parser.continuation import Continuation

GB = 1e9
LITTLE_DISK = 5 * GB
"""Free space below which a run is likely to end early, whatever its model."""
OLDEST_PYTHON = (3, 11)


def _found(name: str, detail: str, fix: str = "", *, needed: bool = True) -> Finding:
    """Return a finding, a problem if it has a fix."""
    return Finding(name=name, ok=not fix, detail=detail, fix=fix, needed=needed)


def python() -> Finding:
    """Return the interpreter and its version."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    too_old = sys.version_info < OLDEST_PYTHON
    return _found("python", detail, "make an environment with Python 3.11 or newer" if too_old else "")


def gpus() -> Finding:
    """Return the GPUs that torch and the driver list."""
    driver = gpus_of_driver()
    try:
        import torch
    except ImportError as error:
        detail = f"{', '.join(driver) or 'none'}; torch cannot be imported ({error})"
        return _found("gpu", detail, "pip install 'rllm[train]'" if driver else "")
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        free = [[size / GB for size in torch.cuda.mem_get_info(index)] for index in devices]
        names = map(torch.cuda.get_device_name, devices)
        each = (f"{name}, {left:.0f} of {total:.0f} GB free" for name, (left, total) in zip(names, free, strict=True))
        return _found("gpu", "; ".join(each))
    if driver:
        fix = "install a build of torch for its driver: see https://pytorch.org/get-started/locally"
        detail = f"{'; '.join(driver)}, which torch {torch.__version__} cannot use"
        return _found("gpu", detail, fix)
    if torch.backends.mps.is_available():
        return _found("gpu", "Apple: models run on the CPU, unless model.device=mps, which is not tested")
    return _found("gpu", "none: models run on the CPU")


def memory(needed: float | None, saving: str | None = None) -> Finding:
    """Return main memory, and whether `needed` bytes fit where models run; `saving` is the setting that saves most."""
    free = free_memory()
    detail = f"{total_memory() / GB:.1f} GB" if free is None else f"{free / GB:.1f} GB free"
    if needed is None:
        return _found("memory", detail)
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpus = sum(torch.cuda.mem_get_info(index)[0] for index in range(num_gpus))
    room = max(total_memory() if free is None else free, on_gpus)
    detail += f"; training all weights takes {needed / GB:.1f} GB"
    detail += f"; {saving} lowers that most" if saving else ""
    fix = "" if needed <= room else f"set {saving or 'model.lora_rank=16'}, or take a smaller model or a larger machine"
    return _found("memory", detail, fix)


def disk(folder: Path, needed: float | None) -> Finding:
    """Return the free space where runs are written; `needed` are the bytes of one checkpoint."""
    nearest = nearest_folder(str(folder.absolute()))
    if not nearest.is_dir():
        return _found("disk", f"{nearest} is a file", "set run_dir (--run-dir) to a folder")
    if (why := why_unwritable(nearest)) is not None:
        return _found("disk", f"{nearest} cannot be written to ({why})", "set run_dir (--run-dir) to a folder of yours")
    free = shutil.disk_usage(nearest).free
    detail = f"{free / GB:.1f} GB free at {folder}"
    least = max(LITTLE_DISK, 3 * (needed or 0.0))  # two checkpoints stay, and a third is made
    if needed is not None:
        detail += f"; a checkpoint takes about {needed / GB:.1f} GB"
    fix = "" if free >= least else "set run_dir to a larger file system, or keep_checkpoints=1"
    return _found("disk", detail, fix)


def reachable_port(port: int) -> Finding:
    """Return whether `rllm gateway` could listen on a port; a training run takes any free one."""
    try:
        bind("127.0.0.1", port).close()
    except ConfigError as error:
        fix = "rllm gateway --port N takes another; training takes any free one"
        return _found("port", str(error), fix, needed=False)
    return _found("port", f"127.0.0.1:{port} is free")


def gpus_of_driver() -> list[str]:
    """Return name and memory of each GPU that the driver lists."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.split("\n") if line.strip()]


NEEDED = ("rllm", "torch", "transformers", "tokenizers", "huggingface-hub", "peft")
"""Packages whose requirements must hold for training here."""
OTHERS = ("vllm", "verl", "ray")
"""Packages that only some runs use, often installed alongside package versions that they do not support."""
TO_TRAIN = ("torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package."""

    version: str
    requires: Sequence[str] = ()


def installed_packages() -> dict[str, Package]:
    """Return the imported distribution of every name in this environment."""
    found: dict[str, Package] = {}
    for item in distributions():
        name = item.metadata["Name"]
        if name:
            found.setdefault(canonicalize_name(name), Package(version=item.version, requires=item.requires or ()))
    return found


def version_findings(packages: Mapping[str, Package]) -> list[Finding]:
    """Return the packages for training, and each unmet requirement with the command that fixes it."""
    there = [name for name in (*TO_TRAIN, *OTHERS) if name in packages]
    missing = [name for name in TO_TRAIN if name not in packages]
    detail = " ".join(f"{name} {packages[name].version}" for name in there) or "none"
    fix = ""
    if missing:
        detail += f"; not installed: {', '.join(missing)}"
        fix = "pip install 'rllm[train]'; the gateway and the SDK work without it"
    return [_found("packages", detail, fix), *_conflicts(packages)]


def _conflicts(packages: Mapping[str, Package]) -> Iterator[Finding]:
    """Yield every unmet requirement; installed packages of our extras must fit, too."""
    for owner in (*NEEDED, *OTHERS):
        for requirement in map(Requirement, packages[owner].requires if owner in packages else ()):
            found = packages.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            wrong = found is None or not requirement.specifier.contains(found.version, prereleases=True)
            if wrong and (applies or (owner == "rllm" and found is not None)):
                wanted = f"{requirement.name}{requirement.specifier}"
                here = f"{requirement.name} {f'{found.version} is installed' if found else 'is not installed'}"
                detail = f"{owner} {packages[owner].version} asks for {wanted}, and {here}"
                yield _found("versions", detail, f"pip install '{wanted}'", needed=owner in NEEDED)


BYTES_TO_TRAIN = 16
"""Bytes for each weight: itself, its gradient, and AdamW's two averages, in float32."""
_OF_SAMPLING = ("temperature", "top_p", "typical_p", "repetition_penalty", "top_k", "min_p")
"""Settings of `generation_config.json` that may change the model's distribution."""

_QUESTION: Message = {"role": "user", "content": "How many figs?"}
_MORE: Message = {"role": "user", "content": "And limes?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "count", "arguments": '{"fruit": "fig"}'}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count fruit.",
        "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
    },
}
_FEW_PIECES = 3
"""Number of tags, lines and texts shown of a rewritten turn."""
CONVERSATIONS: dict[str, list[Message]] = {
    "answers": [_QUESTION, {"role": "assistant", "content": "Seven."}, _MORE],
    "reasoning": [_QUESTION, {"role": "assistant", "content": "Seven.", "reasoning_content": "I count seven."}, _MORE],
    "tool calls": [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "count", "content": "7"},
    ],
}
"""Conversations whose second message is the model's."""


def training_bytes(model: str) -> float | None:
    """Return a bound on the bytes of a checkpoint of all weights; `None` if the model's files are not here."""
    try:
        from rllm.config.sizes import local_folder, num_weights
    except ImportError:
        return None
    try:
        number = num_weights(local_folder(model))
    except (OSError, ValueError, OverflowError):  # a truncated file, which `model_findings` reports
        return None
    return None if number is None else float(number * BYTES_TO_TRAIN)


def predicted(model: str) -> tuple[float | None, str | None]:
    """Return the predicted peak of memory of training all weights, and the setting that lowers it most."""
    try:
        from rllm.config.loading import load_config
        from rllm.trainer.settings import best_saving, predicted_memory
    except ImportError:
        return None, None
    config = load_config([f"model.path={model}"])
    found = predicted_memory(config)
    return (None, None) if found is None else (found.peak, best_saving(config))


def model_findings(model: str) -> list[Finding]:
    """Return the findings about a model: its files, tokenizer, chat template and adapter."""
    try:
        from rllm.config.sizes import is_offline, local_folder
        from rllm.inference.local.loading import check_token_ids, is_adapter, load_tokenizer
        from rllm.inference.model_folder import check_not_quantized, checked_source, config_in, incomplete
        from rllm.parser.chat_template import ChatTemplate
    except ImportError as error:
        return [_found("model", f"cannot be checked: {error}", "pip install 'rllm[train]'")]
    try:
        if not is_adapter(model):
            checked_source(model)
        # What the hub's cache lacks is downloaded when the model is loaded.
        if problem := incomplete(local_folder(model) if is_offline() else Path(model).expanduser()):
            fix = "download the model again, whole: huggingface-cli download OWNER/NAME --local-dir FOLDER"
            return [_found("model", f"{model} {problem}", fix)]
        loaded = load_tokenizer(model)
    except ConfigError as error:
        fix = "name a folder that holds the whole model, or a hub id (owner/name) that can be downloaded"
        return [_found("model", str(error), fix)]
    length = "no bound" if loaded.context_length is None else f"{loaded.context_length:,} tokens"
    folder = local_folder(model)
    there = _found("model", f"{model}: {loaded.num_ids:,} ids, context of {length}")
    of_template = template_findings(loaded.tokenizer)
    try:
        check_not_quantized(model, config_in(folder))
        if all(item.ok or not item.needed for item in of_template):  # else it prints no prompt to check
            check_token_ids(loaded.tokenizer, ChatTemplate(loaded.tokenizer), loaded.num_ids)
            of_template += end_findings(folder, loaded.tokenizer)
    except ConfigError as error:
        detail, _, fix = str(error).rpartition(": ")
        there = _found("model", detail, fix)
    of_adapter = _lora_findings(model) if there.ok else []
    return [there, *of_template, generation_finding(folder), *of_adapter]


def _lora_findings(model: str) -> list[Finding]:
    """Return what an adapter on all linear layers would reach; nothing for a folder that is an adapter itself."""
    from rllm.backends.lora import LoraSettings, coverage
    from rllm.errors import MissingDependencyError
    from rllm.inference.local.loading import is_adapter

    if is_adapter(model):
        return []
    try:
        covered = str(coverage(model, LoraSettings(rank=1, alpha=1.0)))
    except (ConfigError, MissingDependencyError) as error:
        fix = "name layers in model.lora_targets, or train all weights: model.lora_rank=0"
        return [_found("lora", str(error), fix, needed=False)]
    return [_found("lora", f"with model.lora_rank set, {covered}")]


def template_findings(tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Return what the chat template leaves out or refuses, and whether it prints earlier turns as it did at first."""
    from rllm.parser.chat_template import ChatTemplate

    try:
        template = ChatTemplate(tokenizer)
    except ConfigError as error:
        _, _, remedy = str(error).partition(": ")
        return [_found("chat template", "there is none", remedy or str(error))]
    try:
        lost = lost_finding(template.shape.lost)
    except ConfigError as error:
        _, _, found = str(error).partition(": ")
        detail, _, remedy = found.rpartition(": ")
        return [_found("chat template", detail, remedy)]
    turns = _turns_finding(template, tokenizer)
    return [turns] if lost is None else [lost] if turns.ok else [lost, turns]


def lost_finding(lost: Mapping[str, str]) -> Finding | None:
    """Return which kinds of content the template does not print, or None if it prints all."""
    if not lost:
        return None
    from rllm.parser.chat_template import remedy_for

    dropped = [kind for kind, error in lost.items() if not error]
    refused = [f"{kind} ({error})" for kind, error in lost.items() if error]
    detail = [f"prints no {', '.join(dropped)}"] if dropped else []
    detail += [f"refuses {'; '.join(refused)}"] if refused else []
    remedies = dict.fromkeys(map(remedy_for, lost))
    fix = "; ".join(each for each in remedies if not any(each in other for other in remedies if other != each))
    return _found("chat template", ", and ".join(detail), fix, needed=False)


def _turns_finding(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Return whether earlier turns are printed as they were at first."""
    judged = judged_turns(template, tokenizer)
    refused = [f"{kind} ({turns.why})" for kind, turns in judged.items() if not turns.continued]
    rewritten = {kind: turns.why for kind, turns in judged.items() if turns.continued and turns.why}
    if refused:
        fix = "use a template that prints each message once; else every later turn is trained as a sequence of its own"
        detail = f"later turns cannot continue from sampled tokens: {'; '.join(refused)}"
        return _found("chat template", detail, fix, needed=False)
    if rewritten:
        fix = "leave gateway.exact_turns on: later turns then continue from the sampled tokens in any case"
        detail = f"not append-only: it prints earlier {', '.join(rewritten)} differently than at first"
        return _found("chat template", detail, fix, needed=False)
    return _found("chat template", "append-only: it prints earlier turns as it did at first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Behaviour of a chat template in the later turns of a conversation."""

    continued: bool
    """The next prompt can begin with the tokens of the turn before it, as they were sampled."""
    why: str = ""
    """Reason why not; or the way in which the template by itself changes earlier turns."""


def judged_turns(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> dict[str, Turns]:
    """Return how earlier turns are printed, by the kind of conversation."""
    from rllm.parser.continuation import Continuation

    continuation = Continuation(tokenizer, template)
    return {kind: _judged(template, continuation, tokenizer, chat) for kind, chat in CONVERSATIONS.items()}


def _judged(
    template: ChatTemplate, continuation: Continuation, tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message]
) -> Turns:
    tools = [_TOOL] if any(message["role"] == "tool" for message in chat) else None
    try:
        asked = template.render_text(chat[:1], tools, True)
        rendered = template.render_text(chat[:2], tools, False)
        later = template.render_text(chat, tools, True)
        ids = tokenizer.encode(rendered.rstrip(), add_special_tokens=False)
        continued = continuation.prompt_ids(ids, list(chat), 2, tools)
    except ConfigError as error:
        return Turns(continued=False, why=str(error).partition(":")[0])
    if ids[-1] == tokenizer.encode(asked.rstrip(), add_special_tokens=False)[-1]:
        return Turns(continued=False, why="asks for an answer after every message, also after an answer")
    if not later.endswith(tokenizer.decode(continued[len(ids) :])):
        return Turns(continued=False, why="renders a message differently after an answer that was sampled")
    reasoning = chat[1].get("reasoning_content", "")
    if reasoning and reasoning in rendered and reasoning not in later:
        return Turns(continued=True, why="leaves out the reasoning of earlier answers")
    if not rendered.startswith(asked):
        return Turns(continued=True, why=f"prints answers without {_after_common(asked, rendered)!r} of its prompt")
    if not later.startswith(rendered.rstrip()):
        return Turns(continued=True, why=f"leaves {_after_common(rendered, later)!r} out of earlier answers")
    return Turns(continued=True)


def _after_common(text: str, other: str) -> str:
    """Return the first tags, lines or words of `text` after the part that both texts begin with."""
    from rllm.parser.append_only import common_length

    pieces, others = (re.findall(r"<[^<>]*>|\n|[^<\n]+|<", each) for each in (text, other))
    number = common_length(pieces, others)
    return "".join(pieces[number : number + _FEW_PIECES])


def end_findings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Return a finding if the model's files do not list the token with which the chat template ends an answer."""
    from rllm.inference.local.loading import listed_ends, unlisted_end
    from rllm.inference.model_folder import config_in
    from rllm.parser.chat_template import ChatTemplate

    files = (config_in(folder), config_in(folder, "generation_config.json"))
    listed = listed_ends(tokenizer.eos_token_id, *(about.get("eos_token_id") for about in files))
    detail, _, fix = unlisted_end(ChatTemplate(tokenizer), tokenizer, listed).rpartition("; ")
    return [_found("end token", detail, fix, needed=False)] if detail else []


def generation_finding(folder: Path) -> Finding:
    """Return whether the model's own defaults would change what is sampled."""
    from rllm.inference.model_folder import config_in

    settings = config_in(folder, "generation_config.json")
    given = {name: settings[name] for name in _OF_SAMPLING if name in settings}
    changed = {name: value for name, value in given.items() if not is_neutral(name, value)}
    if not changed:
        return _found("generation config", "leaves the model's distribution as it is")
    listed = ", ".join(f"{name}={value}" for name, value in changed.items())
    detail = f"asks for {listed}; model.engine does not follow it, other servers do"
    fix = "start servers of your own with: vllm serve ... --generation-config vllm"
    return _found("generation config", detail, fix, needed=False)


def run_checks(
    *,
    server: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    run_dir: Path = Path("runs"),
    port: int = 8080,
) -> Checks:
    """Check everything that needs no training: this machine and a model, or a server.

    Args:
        server: base URL of an OpenAI-compatible server to check, instead of this machine.
        api_key: the server's key, if it needs one.
        model: a folder or hub id, as `model.path`; with a server the name to request, by default the first served.
        run_dir: folder in which runs are to be written.
        port: port on which `rllm gateway` is to listen.

    Raises:
        ConfigError: if the server's URL is not a web address.
    """
    if server is not None:
        return probe(server, model=model, api_key=api_key)
    needed, (peak, saving) = (None, (None, None)) if model is None else (training_bytes(model), predicted(model))
    found = [python(), *version_findings(installed_packages())]
    found += [gpus(), memory(peak, saving), disk(run_dir, needed), reachable_port(port)]
    return Checks(model=model, findings=found if model is None else [*found, *model_findings(model)])
