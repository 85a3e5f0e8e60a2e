"""A model folder or hub id to a model and its tokenizer, on the best device there is."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, logging

from rllm._runtime.files import is_named_by
from rllm._runtime.untrusted import read_json
from rllm.errors import ConfigError, MissingDependencyError, first_line
from rllm.inference.local.kernels import keep_few_kernels
from rllm.inference.local.weights import check_complete, check_finite
from rllm.parser.tool_prompt import TemplateChoice

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
TRUSTED_MODELS = "RLLM_TRUSTED_MODELS"
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""How a model with images is given these; servers do not start without."""
_PATTERNS = (
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
)
"""Settings of an adapter in which peft may see regular expressions, also in keys."""
_REPEATED_GROUP, _REPEATS, _MAX_REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+]|\{\d*,\d*\}"), 6
_SHORTEST = 2
"""A prompt of one token, and an answer of one."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A causal language model that is ready to use."""

    model: Any
    """A `transformers` model in evaluation mode, on `device`."""
    tokenizer: Any
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """What can be known of a model without its weights."""

    tokenizer: Any
    num_ids: int
    """Ids that the model has an embedding for; often a few more than the tokenizer gives."""
    context_length: int | None
    """See `context_length`."""


def context_length(config: Any) -> int | None:
    """Tokens that a model has positions for; `None` where there is no bound.

    With longrope (Phi-3, Phi-4-mini) a sequence that outgrows the lengths of pretraining has other positions from its first
    token on, so that what was computed of its beginning would have to be computed anew: there the bound is these lengths.
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is not None and rope.get("rope_type") == "longrope":
        return min(limit, int(rope["original_max_position_embeddings"]))
    return limit


def described(path: str | Path) -> Any | None:
    """Return the Hugging Face configuration of a model's folder; `None` for a hub id, or where it cannot be read."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return None
    try:
        return _loaded(AutoConfig.from_pretrained, str(folder), "configuration")
    except ConfigError:  # which loading the model reports
        return None


def longrope_note(config: Any) -> str:
    """Return why the context is shorter than the model's files state, as the end of a sentence; empty where it is not."""
    limit, most = context_length(config), getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit == most:
        return ""
    return f", not {most}: beyond, longrope gives a sequence other positions from its first token on"


def check_length(config: Any, wanted: int) -> None:
    """Check `model.max_length` against the context of a model, given its Hugging Face configuration.

    Raises:
        ConfigError: if more is wanted than the model has positions for.
    """
    limit = context_length(config)
    if wanted >= _SHORTEST and (limit is None or wanted <= limit):
        return
    has = "" if limit is None else f", and the model has a context of {limit} tokens{longrope_note(config)}"
    use = f"at least {_SHORTEST}" if limit is None else f"{_SHORTEST} to {limit}"
    raise ConfigError(
        f"model.max_length={wanted}: prompt and answer share it{has}; use {use}, or leave it out for the model's own context"
    )


def load_tokenizer(path_or_id: str | Path, *, template: TemplateChoice | None = None) -> LoadedTokenizer:
    """Return the tokenizer that `load_model` gives for the same folder or hub id and template.

    Raises:
        ConfigError: if there is none, or if the template cannot be used.
    """
    loaded = _loaded_tokenizer(path_or_id)
    if template:
        template.apply(loaded.tokenizer)
    return loaded


def _loaded_tokenizer(path_or_id: str | Path) -> LoadedTokenizer:
    adapter = Path(path_or_id).expanduser()
    if is_adapter(adapter):
        base = _loaded_tokenizer(base_of(adapter))
        return replace(base, tokenizer=_tokenizer_of(adapter, base.tokenizer))
    source = _checked_source(path_or_id)
    config = _loaded(AutoConfig.from_pretrained, source, "configuration").get_text_config(decoder=True)
    return LoadedTokenizer(
        tokenizer=_loaded(AutoTokenizer.from_pretrained, source, "tokenizer"),
        num_ids=config.vocab_size,
        context_length=context_length(config),
    )


def load_model(
    path_or_id: str | Path, *, dtype: str = "auto", device: str = "auto", template: TemplateChoice | None = None
) -> LoadedModel:
    """Load any Hugging Face causal language model from a folder or a hub id; the folder may be that of a LoRA adapter,
    which is merged into the model that it names.

    `dtype` is `float32`, `bfloat16` or `auto`: bfloat16 on CUDA, else float32. `device` is a torch device or `auto`.
    `template` replaces the model's chat template, before weights are read.

    Raises:
        ConfigError: if there is no such model, if its folder is incomplete, if this needs a package that is not installed, or if
            a setting is wrong.
    """
    if template:
        tokenizer = load_tokenizer(path_or_id, template=template).tokenizer
        return replace(load_model(path_or_id, dtype=dtype, device=device), tokenizer=tokenizer)
    adapter = Path(path_or_id).expanduser()
    if is_adapter(adapter):
        return _merged(adapter, dtype=dtype, device=device)
    source = _checked_source(path_or_id)
    target = choose_device(device)
    chosen_dtype = choose_dtype(dtype, target)
    if target.type == "cpu":
        keep_few_kernels()
    config = _loaded(AutoConfig.from_pretrained, source, "configuration")
    tokenizer = _loaded(AutoTokenizer.from_pretrained, source, "tokenizer")
    model, found = _loaded(
        _kind_of(config).from_pretrained,
        source,
        "weights",
        config=config,
        dtype=chosen_dtype,
        attn_implementation=attention_of(config),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_complete(source, model, found)
    check_finite(source, model)
    _processor_files(model, local_files_only=False)  # a hub id's are then at hand when it is saved
    return LoadedModel(model=model.to(target).eval(), tokenizer=tokenizer, device=target)


def load_outline(path_or_id: str | Path) -> Any:
    """Return a model with the shapes of its weights and no numbers, on torch's device `meta`.

    Raises:
        ConfigError: if there is no such model, or if its configuration cannot be read.
    """
    config = _loaded(AutoConfig.from_pretrained, _checked_source(path_or_id), "configuration")
    with torch.device("meta"):
        return _kind_of(config).from_config(config, attn_implementation=attention_of(config))


def _kind_of(config: Any) -> Any:
    """What loads the model that is in the folder: one with images is kept whole, so that what is saved of it is served as it was.

    `transformers` has some of these as language models, too: their text part alone, under other names.
    """
    kinds = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    known = {kind: models[type(config)].__name__ for kind, models in kinds.items() if type(config) in models}
    kept = (kind for kind, name in known.items() if name in (config.architectures or ()))
    return next(kept, next(iter(known), AutoModelForCausalLM))


def attention_of(config: Any) -> str | None:
    """`transformers`' fastest kind of attention that computes all that the model is; `None` leaves it to choose, which is `sdpa` for
    models that have it. `sdpa` passes over a bound of the attention scores, as Gemma 2 has one, without a word; and where each token
    attends to a chosen few, as in GLM 5, it lets them be later ones."""
    text = config.get_text_config(decoder=True)
    is_bounded = getattr(text, "attn_logit_softcapping", None) is not None
    return "eager" if is_bounded or hasattr(text, "index_topk") else None


def is_adapter(path_or_id: str | Path) -> bool:
    """Whether it is the folder of a LoRA adapter, and of no model."""
    folder = Path(path_or_id).expanduser()
    return (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").exists()


def base_of(adapter: Path) -> str:
    """Return the model that a peft adapter was made for."""
    try:
        base = read_json(adapter / ADAPTER_FILE)["base_model_name_or_path"]
        if not isinstance(base, str):
            raise TypeError(f"it is {base!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model={str(adapter)!r}: its {ADAPTER_FILE} names no base model ({error})") from error
    return base


def _check_adapter(adapter: Path) -> None:
    """Refuse an adapter that names code to import, or patterns that may take for ever on the names of a model's parts.

    Raises:
        ConfigError: naming the setting.
    """
    try:
        settings = dict(read_json(adapter / ADAPTER_FILE))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model={str(adapter)!r}: its {ADAPTER_FILE} cannot be read ({error})") from error
    if settings.get("megatron_config"):
        raise ConfigError(f"model={str(adapter)!r}: its {ADAPTER_FILE} names code (megatron_core), which is not run")
    for name in _PATTERNS:
        value = settings.get(name) or ()
        for pattern in map(str, [value] if isinstance(value, str) else value):
            if _REPEATED_GROUP.search(pattern) or len(_REPEATS.findall(pattern)) > _MAX_REPEATS:
                raise ConfigError(
                    f"model={str(adapter)!r}: {name} in its {ADAPTER_FILE} is a pattern that may take for ever: list the "
                    "names of the modules"
                )


def _merged(adapter: Path, *, dtype: str, device: str) -> LoadedModel:
    """The model that a peft adapter was made for, with the adapter's weights added to its own."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("peft", "train", f"loading the LoRA adapter {str(adapter)!r}") from error
    _check_adapter(adapter)
    loaded = load_model(base_of(adapter), dtype=dtype, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with_adapter = _loaded(partial(peft.PeftModel.from_pretrained, loaded.model), str(adapter), "adapter")
        except RuntimeError as error:
            raise ConfigError(
                f"model={str(adapter)!r}: this adapter does not fit {base_of(adapter)}, such as for tokens that were added to that: save "
                f"a whole model with peft's AutoPeftModelForCausalLM and merge_and_unload(), and name that"
            ) from error
    own = peft.get_peft_model_state_dict(with_adapter, save_embedding_layers=False)
    weights = adapter / ADAPTER_WEIGHTS_FILE
    if weights.is_file() and own.keys() == (saved := load_file(weights)).keys():
        take_weights(own, saved)
    elif any("missing adapter keys" in str(warning.message) for warning in said):
        raise ConfigError(
            f"model={str(adapter)!r}: this adapter's weights are not named as those of {type(loaded.model).__name__}, so it would "
            f"change nothing: was it made for the model that its {ADAPTER_FILE} names ({base_of(adapter)})?"
        )
    check_finite(str(adapter), with_adapter)
    _untie(loaded.model)
    tokenizer = _tokenizer_of(adapter, loaded.tokenizer)
    return replace(loaded, model=with_adapter.merge_and_unload().eval(), tokenizer=tokenizer)


def _tokenizer_of(adapter: Path, base: Any) -> Any:
    """The one beside an adapter, which may have a chat template that its base has not; else the base's."""
    has_own = (adapter / "tokenizer_config.json").is_file()
    return _loaded(AutoTokenizer.from_pretrained, str(adapter), "tokenizer") if has_own else base


def _untie(model: Any) -> None:
    """Give the head weights of its own where the adapter is on it or on the embeddings: merged into what both share, it would change
    both."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings, head = (getattr(end, "base_layer", end) for end in ends)
    if ends != [embeddings, head] and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = model.config.get_text_config(decoder=True).tie_word_embeddings = False


def take_weights(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Bring an adapter's weights to what was saved of them, under the very names that they have.

    peft renames what it loads as `transformers` renames the weights of older models, which loses some of what is named as in
    this one (Laguna's shared experts), with no more than a warning.
    """
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(saved[name])


def save_model(model: Any, folder: Path, **options: Any) -> None:
    """Write a model as an ordinary Hugging Face folder; `options` are those of its `save_pretrained`."""
    with without_bars(), _valid_generation_config(model) as own:
        model.save_pretrained(folder, **options)
    if own is not None:
        own.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    for path in _processor_files(model, local_files_only=True):
        shutil.copyfile(path, folder / Path(path).name)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into such a folder.

    Raises:
        OSError: if it cannot be written, of which `tokenizers` tells by an exception of no kind.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error


@contextmanager
def _valid_generation_config(model: Any) -> Iterator[Any]:
    """Inside, the model has a generation config that `transformers` saves. It loads any, but refuses to save one with settings that
    have no effect, such as a temperature without do_sample, as many a model has; gives the model's own."""
    own = model.generation_config
    if own is not None:
        model.generation_config = GenerationConfig()
    try:
        yield own
    finally:
        model.generation_config = own


def text_parts(model: Any) -> list[Any] | None:
    """The modules of a model with images that text passes; `None` where there is nothing beside them."""
    if not hasattr(model.config, "vision_config"):
        return None
    return [model.get_decoder(), model.get_output_embeddings()]


def _processor_files(model: Any, *, local_files_only: bool) -> list[str]:
    """Those of the folder or hub id that the model came from; none where it is gone since."""
    if not model.name_or_path or not hasattr(model.config, "vision_config"):
        return []
    options = {"_raise_exceptions_for_missing_entries": False, "local_files_only": local_files_only}
    try:
        found = [cached_file(model.name_or_path, name, **options) for name in _PROCESSOR_FILES]
    except OSError:
        return []
    return [path for path in found if path is not None]


@contextmanager
def without_bars() -> Iterator[None]:
    """While inside, transformers draws no progress bars: they would stand between the lines of whoever called us. Those of a
    download from the hub stay."""
    before = logging.set_tqdm_hook(lambda make, args, options: make(*args, **{**options, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def choose_device(device: str = "auto") -> torch.device:
    """The named device; `auto` is CUDA where there is one, and else the CPU: on MPS nothing here was ever tried."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: use auto, cpu, cuda, cuda:N or mps") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: this torch finds no CUDA GPU; use auto or cpu")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={device!r}: this torch finds no Apple GPU; use auto or cpu")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The named dtype; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r}: use one of {['auto', *_DTYPES]}")
    return _DTYPES[dtype]


def check_tokenizer_in(folder: Path, tokenizer: Any) -> None:
    """Hold the tokenizer in a folder against another one: weights know tokens by their ids, so with other ids they are those of
    another model.

    Raises:
        ConfigError: if there is none.
        ValueError: if its ids or its chat template are others.
    """
    saved = _loaded(AutoTokenizer.from_pretrained, str(folder), "tokenizer")
    if saved.get_vocab() != tokenizer.get_vocab() or saved.chat_template != tokenizer.chat_template:
        raise ValueError("its tokenizer or chat template is not the one in model.path: has that model been replaced?")


def check_source(path_or_id: str | Path) -> None:
    """Look whether there is a model, or an adapter, without loading it; what may be a hub id is believed.

    Raises:
        ConfigError: if it is a path, and not that of a model's folder.
    """
    if not is_adapter(path_or_id):
        _checked_source(path_or_id)


def _checked_source(path_or_id: str | Path) -> str:
    """The source as `transformers` wants it; what looks like a path is never looked up on the hub."""
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            of_run = ", such as a checkpoint of this run" if (folder / "checkpoints").is_dir() else ""
            raise ConfigError(
                f"model={str(path_or_id)!r}: the folder has no config.json; point to a Hugging Face model folder{of_run}"
            )
        return str(folder)
    if folder.exists():
        raise ConfigError(f"model={str(path_or_id)!r} is a file; point to the folder that holds config.json")
    if _looks_like_path(path_or_id):
        raise ConfigError(
            f"model={str(path_or_id)!r}: there is no such folder; check the path, or use a hub id (owner/name)"
        )
    return str(path_or_id)


def _looks_like_path(path_or_id: str | Path) -> bool:
    """Whether this is anything but `owner/name`; `folder/name` is a path where there is such a folder."""
    if isinstance(path_or_id, Path):
        return True
    owner, _, name = path_or_id.partition("/")
    return not name or "/" in name or "\\" in name or owner in ("", ".", "..", "~") or Path(owner).is_dir()


def may_bring_code(source: str) -> bool:
    """Return whether the user trusts the code in a model folder, or behind a hub id, by naming it in RLLM_TRUSTED_MODELS."""
    named = os.environ.get(TRUSTED_MODELS, "").split(os.pathsep)
    return is_named_by(TRUSTED_MODELS, Path(source)) if Path(source).is_dir() else source in named


def _loaded(load: Any, source: str, part: str, **options: Any) -> Any:
    """Call a `from_pretrained`. Code that comes with the model is run only if `RLLM_TRUSTED_MODELS` names the folder.

    Raises:
        ConfigError: naming the setting and the remedy, which the library's own errors do not.
    """
    try:
        with without_bars():
            return load(source, trust_remote_code=may_bring_code(source), **options)
    except UnpicklingError as error:
        raise ConfigError(
            f"model={source!r}: cannot load its {part}: they are pickled and hold more than tensors, which could run code "
            f"({first_line(error)}); save the model again with safetensors"
        ) from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            remedy = (
                "it brings code of its own (auto_map in its config.json), which is not run; use a model that transformers has, "
                f"or read the code and set {TRUSTED_MODELS}={source}"
            )
        elif Path(source).is_dir():
            remedy = "the folder must hold config.json, the weights (*.safetensors) and the tokenizer's files"
        else:
            remedy = (
                "it is no local folder and the hub did not give it; check the id and the network, download it first, "
                "or set HF_HUB_OFFLINE=1 to use only what is already cached"
            )
        raise ConfigError(f"model={source!r}: cannot load its {part}: {remedy} ({first_line(error)})") from error
