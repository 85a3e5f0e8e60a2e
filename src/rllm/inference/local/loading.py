"""Loading and saving models and tokenizers: Hugging Face folders, hub ids, and LoRA adapters."""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from rllm._runtime.process import keep_freed_memory
from rllm._runtime.untrusted import read_json
from rllm.config.schema import ModelConfig
from rllm.config.sizes import is_offline, local_folder
from rllm.errors import ConfigError, needed
from rllm.inference.model_folder import (
    check_files,
    check_not_quantized,
    checked_source,
    config_in,
    from_pretrained,
    without_bars,
)
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_prompt import TemplateChoice
from rllm.types import JSONMapping

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files that prepare images for a model; servers do not start without them."""
_PATTERNS = (
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
)
"""Settings of an adapter that peft may read as regular expressions, also in keys."""
_REPEATED_GROUP, _REPEATS, _MAX_REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+]|\{\d*,\d*\}"), 6
_SHORTEST = 2
"""A prompt of one token, and an answer of one."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A causal language model, ready to use."""

    model: PreTrainedModel
    """A `transformers` model in evaluation mode, on `device`."""
    tokenizer: PreTrainedTokenizerBase
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """A tokenizer, and facts about its model that need no weights."""

    tokenizer: PreTrainedTokenizerBase
    num_ids: int
    """Number of ids with an embedding; often a few more than the tokenizer has."""
    context_length: int | None


def context_length(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model has positions for; `None` where there is no bound.

    With longrope (Phi-3, Phi-4-mini), positions change from the first token on when a sequence outgrows the length of
    pretraining, which would invalidate all cached states: there the bound is that length.
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is not None and rope.get("rope_type") == "longrope":
        return min(limit, int(rope["original_max_position_embeddings"]))
    return limit


def described(path: str | Path) -> PretrainedConfig | None:
    """Return the Hugging Face configuration of a model's folder; `None` for a hub id, or where it cannot be read."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return None
    try:
        return from_pretrained(AutoConfig.from_pretrained, str(folder), "configuration")
    except ConfigError:  # loading the model reports it
        return None


def longrope_note(config: PretrainedConfig) -> str:
    """Return why the context is shorter than the model's files state, as the end of a sentence; else empty."""
    limit, most = context_length(config), getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit == most:
        return ""
    return f", not {most}: beyond that, longrope gives a sequence other positions from its first token on"


def check_length(config: PretrainedConfig, wanted: int) -> None:
    """Raise `ConfigError` if `model.max_length` is more than the context of a model with this configuration."""
    limit = context_length(config)
    if wanted >= _SHORTEST and (limit is None or wanted <= limit):
        return
    has = "" if limit is None else f", and the model has a context of {limit} tokens{longrope_note(config)}"
    use = f"at least {_SHORTEST}" if limit is None else f"{_SHORTEST} to {limit}"
    raise ConfigError(
        f"model.max_length={wanted}: prompt and answer share it{has}; use {use}, or leave it out for the "
        "model's own context"
    )


def tokenizer_of(model: ModelConfig) -> LoadedTokenizer:
    """Return the tokenizer of a configuration's `model` section; see `load_tokenizer`."""
    return load_tokenizer(model.path, template=TemplateChoice.of(model))


def load_tokenizer(path_or_id: str | Path, *, template: TemplateChoice | None = None) -> LoadedTokenizer:
    """Return the tokenizer that `load_model` gives for the same folder or hub id and template.

    Raises:
        ConfigError: if there is no tokenizer, or if the template cannot be used.
    """
    adapter = Path(path_or_id).expanduser()
    if is_adapter(adapter):
        base = load_tokenizer(base_of(adapter))
        loaded = replace(base, tokenizer=_tokenizer_of(adapter, base.tokenizer))
    else:
        source = checked_source(path_or_id)
        config = from_pretrained(AutoConfig.from_pretrained, source, "configuration").get_text_config(decoder=True)
        loaded = LoadedTokenizer(
            tokenizer=from_pretrained(AutoTokenizer.from_pretrained, source, "tokenizer"),
            num_ids=config.vocab_size,
            context_length=context_length(config),
        )
    if template:
        template.apply(loaded.tokenizer)
    return loaded


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    template: TemplateChoice | None = None,
    to_train: bool = False,
) -> LoadedModel:
    """Load any Hugging Face causal language model.

    Args:
        path_or_id: folder or hub id; a LoRA adapter's folder is merged into the model that it names.
        dtype: `float32`, `bfloat16` or `auto` (bfloat16 on CUDA, else float32).
        device: torch device or `auto`.
        template: replaces the model's chat template, before weights are read.
        to_train: see `check_source`; a hub id is checked again when its configuration is there.

    Raises:
        ConfigError: if the model does not exist, its folder is incomplete, a needed package is not installed, quantized
            weights are to be trained, or a setting is wrong.
    """
    if template:
        tokenizer = load_tokenizer(path_or_id, template=template).tokenizer
        return replace(load_model(path_or_id, dtype=dtype, device=device, to_train=to_train), tokenizer=tokenizer)
    adapter = Path(path_or_id).expanduser()
    if is_adapter(adapter):
        return _merged(adapter, dtype=dtype, device=device, to_train=to_train)
    source = checked_source(path_or_id)
    target = choose_device(device)
    chosen_dtype = choose_dtype(dtype, target)
    if target.type == "cpu":
        keep_freed_memory()
    config = from_pretrained(AutoConfig.from_pretrained, source, "configuration")
    if to_train:
        check_not_quantized(source, config.to_dict())
    tokenizer = from_pretrained(AutoTokenizer.from_pretrained, source, "tokenizer")
    model, found = from_pretrained(
        _kind_of(config).from_pretrained,
        source,
        "weights",
        config=config,
        dtype=chosen_dtype,
        attn_implementation=attention_of(config),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _check_complete(source, model, found)
    _check_finite(source, model)
    _processor_files(model, local_files_only=False)  # so that a hub id's are cached when it is saved
    return LoadedModel(model=model.to(target).eval(), tokenizer=tokenizer, device=target)


def load_outline(path_or_id: str | Path) -> PreTrainedModel:
    """Return a model without numbers in its weights, on torch's device `meta`; raise `ConfigError` as `load_model`."""
    config = from_pretrained(AutoConfig.from_pretrained, checked_source(path_or_id), "configuration")
    with torch.device("meta"):
        return _kind_of(config).from_config(config, attn_implementation=attention_of(config))


def _kind_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that loads a model. One with images is kept whole, so that a server can load it later.

    `transformers` has some of these as language models, too: their text part alone, under other names.
    """
    kinds = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    known = {kind: models[type(config)].__name__ for kind, models in kinds.items() if type(config) in models}
    kept = (kind for kind, name in known.items() if name in (config.architectures or ()))
    kind: type[PreTrainedModel] = next(kept, next(iter(known), AutoModelForCausalLM))
    return kind


def attention_of(config: PretrainedConfig) -> str | None:
    """Return the attention implementation that is correct for a model; `None` leaves the choice to `transformers`.

    `transformers` prefers `sdpa`, which silently ignores a bound of the attention scores (Gemma 2), and lets tokens
    that attend to a selected few (GLM 5) attend to later ones.
    """
    text = config.get_text_config(decoder=True)
    is_bounded = getattr(text, "attn_logit_softcapping", None) is not None
    return "eager" if is_bounded or hasattr(text, "index_topk") else None


def is_adapter(path_or_id: str | Path) -> bool:
    """Return whether it is the folder of a LoRA adapter without a model."""
    folder = Path(path_or_id).expanduser()
    return (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").exists()


MERGE_IT = (
    "merge it into its model with `rllm export RUN --model FOLDER`, or peft's merge_and_unload(), and use that folder"
)
"""Remedy for an adapter where a whole model is needed."""


def base_of(adapter: Path) -> str:
    """Return the model that a peft adapter was made for."""
    try:
        base = read_json(adapter / ADAPTER_FILE)["base_model_name_or_path"]
        if not isinstance(base, str):
            raise TypeError(f"it is {base!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path={str(adapter)!r}: its {ADAPTER_FILE} names no base model ({error})") from error
    return base


def _check_adapter(adapter: Path) -> None:
    """Refuse an adapter that names code to import, or patterns that may never finish on the names of modules."""
    try:
        settings = dict(read_json(adapter / ADAPTER_FILE))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.path={str(adapter)!r}: its {ADAPTER_FILE} cannot be read ({error})") from error
    if settings.get("megatron_config"):
        raise ConfigError(
            f"model.path={str(adapter)!r}: its {ADAPTER_FILE} names code (megatron_core), which is not run: remove "
            "megatron_config"
        )
    for name in _PATTERNS:
        value = settings.get(name) or ()
        for pattern in map(str, [value] if isinstance(value, str) else value):
            if _REPEATED_GROUP.search(pattern) or len(_REPEATS.findall(pattern)) > _MAX_REPEATS:
                raise ConfigError(
                    f"model.path={str(adapter)!r}: {name} in its {ADAPTER_FILE} is a pattern that may never finish: "
                    "list the names of the modules"
                )


def _merged(adapter: Path, *, dtype: str, device: str, to_train: bool) -> LoadedModel:
    """Return the model that a peft adapter was made for, with the adapter's weights merged."""
    with needed("peft", "train", f"loading the LoRA adapter {str(adapter)!r}"):
        import peft
    _check_adapter(adapter)
    loaded = load_model(base_of(adapter), dtype=dtype, device=device, to_train=to_train)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with_adapter = from_pretrained(
                partial(peft.PeftModel.from_pretrained, loaded.model), str(adapter), "adapter"
            )
        except RuntimeError as error:
            raise ConfigError(
                f"model.path={str(adapter)!r}: this adapter does not fit {base_of(adapter)}, perhaps because tokens "
                "were added: save a whole model with peft's AutoPeftModelForCausalLM and merge_and_unload(), and use "
                "that"
            ) from error
    own = peft.get_peft_model_state_dict(with_adapter, save_embedding_layers=False)
    weights = adapter / ADAPTER_WEIGHTS_FILE
    if weights.is_file() and own.keys() == (saved := load_file(weights)).keys():
        take_weights(own, saved)
    elif any("missing adapter keys" in str(warning.message) for warning in caught):
        raise ConfigError(
            f"model.path={str(adapter)!r}: this adapter's weights do not have the names of "
            f"{type(loaded.model).__name__}, so it would change nothing: check that it was made for the model in its "
            f"{ADAPTER_FILE} ({base_of(adapter)})"
        )
    _check_finite(str(adapter), with_adapter)
    _untie(loaded.model)
    tokenizer = _tokenizer_of(adapter, loaded.tokenizer)
    return replace(loaded, model=with_adapter.merge_and_unload().eval(), tokenizer=tokenizer)


def _tokenizer_of(adapter: Path, base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return an adapter's own tokenizer, which may have another chat template; else its base's."""
    has_own = (adapter / "tokenizer_config.json").is_file()
    return from_pretrained(AutoTokenizer.from_pretrained, str(adapter), "tokenizer") if has_own else base


def _untie(model: PreTrainedModel) -> None:
    """Give the head weights of its own if the adapter is on it or on the embeddings: merging would change both."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings, head = (getattr(end, "base_layer", end) for end in ends)
    if ends != [embeddings, head] and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = model.config.get_text_config(decoder=True).tie_word_embeddings = False


def take_weights(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into an adapter by their exact names.

    peft renames weights as `transformers` does for older models, which drops some of them (Laguna's shared experts)
    with only a warning.
    """
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(saved[name])


def save_model(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Write a model as an ordinary Hugging Face folder; `options` are passed to its `save_pretrained`."""
    own = model.generation_config
    if own is not None:  # `transformers` loads any, but refuses to save some: a temperature without do_sample
        model.generation_config = GenerationConfig()
    try:
        with without_bars():
            model.save_pretrained(folder, **options)
    finally:
        model.generation_config = own
    if own is not None:
        own.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    for path in _processor_files(model, local_files_only=True):
        shutil.copyfile(path, folder / Path(path).name)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into a model's folder; raise `OSError` where `tokenizers` raises a bare `Exception`."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error


def text_parts(model: PreTrainedModel) -> list[torch.nn.Module] | None:
    """Return the modules that text passes through in a model with images; `None` for one without."""
    if not hasattr(model.config, "vision_config"):
        return None
    return [model.get_decoder(), model.get_output_embeddings()]


def _processor_files(model: PreTrainedModel, *, local_files_only: bool) -> list[str]:
    """Return the processor files of the folder or hub id that the model came from; none if it is gone."""
    if not model.name_or_path or not hasattr(model.config, "vision_config"):
        return []
    options = {"_raise_exceptions_for_missing_entries": False, "local_files_only": local_files_only}
    try:
        found = [cached_file(model.name_or_path, name, **options) for name in _PROCESSOR_FILES]
    except OSError:
        return []
    return [path for path in found if path is not None]


def choose_device(device: str = "auto") -> torch.device:
    """Return the named device; `auto` is CUDA if there is one, else the CPU (MPS is untested)."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device={device!r}: use auto, cpu, cuda, cuda:N or mps") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device={device!r}: this torch finds no CUDA GPU; use auto or cpu")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"model.device={device!r}: this torch finds no Apple GPU; use auto or cpu")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the named dtype; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype={dtype!r}: use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def check_tokenizer_in(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer in a folder equals another one, since weights depend on its ids.

    Raises:
        ConfigError: if there is none.
        ValueError: if its ids or its chat template differ.
    """
    saved = from_pretrained(AutoTokenizer.from_pretrained, str(folder), "tokenizer")
    if saved.get_vocab() != tokenizer.get_vocab() or saved.chat_template != tokenizer.chat_template:
        raise ValueError("its tokenizer or chat template does not match model.path: restore the model that was trained")


def check_source(path_or_id: str | Path, *, template: TemplateChoice | None = None, to_train: bool = False) -> None:
    """Check a model or adapter without loading its weights; a possible hub id is not looked up.

    Args:
        path_or_id: see `load_model`.
        template: see `load_model`.
        to_train: its weights, or an adapter on them, are to be trained.

    Raises:
        ConfigError: if it is a path, but not to a model's folder; or if files are missing or damaged, the chat
            template cannot be used, the tokenizer is of another model, or quantized weights are to be trained.
    """
    if is_adapter(path_or_id):
        return
    is_folder = Path(checked_source(path_or_id)).is_dir()
    folder = local_folder(str(path_or_id))
    if to_train:
        check_not_quantized(path_or_id, config_in(folder))
    if not is_folder and not is_offline():  # what the hub's cache lacks is downloaded first
        return
    check_files(folder)
    loaded = load_tokenizer(folder, template=template)
    check_token_ids(loaded.tokenizer, ChatTemplate(loaded.tokenizer), loaded.num_ids)


def check_token_ids(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, num_ids: int) -> None:
    """Check that a model has the tokens that its chat template prints.

    Tokenizers may have more tokens than the model, such as one for images in Gemma 3 1B; they only matter in a prompt.

    Raises:
        ConfigError: if it lacks one, or if the template does not print user messages.
    """
    _ = template.shape  # raises for a template without user messages
    most = max(template.render([{"role": "user", "content": "Hello."}]), default=0)
    if most >= num_ids:
        raise ConfigError(
            f"tokenizer={tokenizer.name_or_path!r}: it has {len(tokenizer)} tokens, and the model {num_ids}; a prompt "
            f"has {tokenizer.decode([most])!r}, id {most}, which the model lacks: use the tokenizer that the model "
            "was trained with"
        )


def listed_ends(*values: int | Collection[int] | None) -> frozenset[int]:
    """Return the ids that end an answer by the values of `eos_token_id` in a model's files."""
    return frozenset(end for value in values for end in ([value] if isinstance(value, int) else value or ()))


def unlisted_end(
    template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, listed: Collection[int], *, on_server: bool = False
) -> str:
    """Return a warning if the template ends an answer with a token that is not among the listed ends, else empty.

    The files of a converted model may name another token than the one with which its template ends an answer. The
    embedded engine ends answers there, a server does not.
    """
    end = template.end_id
    if end is None or end in listed:
        return ""
    others = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(listed)))) or "none"
    effect, servers = ("the server does not end it there", "") if on_server else ("it ends there, too", " for servers")
    return (
        f"the chat template ends an answer with {tokenizer.convert_ids_to_tokens(end)!r}, id {end}, which the model's "
        f"files do not list as an end ({others}): {effect}; add it to eos_token_id in generation_config.json{servers}"
    )


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> frozenset[int]:
    """Return every id that ends an answer, by the model's configurations, the tokenizer and the template."""
    ends = _listed_by(model, tokenizer)
    return ends if template.end_id is None else ends | {template.end_id}


def warn_of_ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, *, on_server: bool = False
) -> None:
    """Log if the model's files do not list the template's end of an answer, or if the template prints no end."""
    if problem := unlisted_end(template, tokenizer, _listed_by(model, tokenizer), on_server=on_server):
        logger.warning("%s", problem)
    ends = end_ids(model, tokenizer, template)
    if not template.ends_answers(ends):
        logger.warning(
            "the chat template prints none of the model's ends (%s) after an answer, so answers are cut at their "
            "maximum length unless the model ends them by itself: name a template that prints one with "
            "model.chat_template=PATH",
            ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(ends)))) or "it has none",
        )


def _listed_by(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    return listed_ends(*(getattr(source, "eos_token_id", None) for source in sources))


def _check_complete(source: str, model: PreTrainedModel, found: JSONMapping) -> None:
    """Refuse a model whose missing weights `transformers` has made up, with only a warning."""
    made_up = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if made_up:
        others = ", ..." if len(made_up) > 3 else ""
        raise ConfigError(
            f"model.path={source!r}: {len(made_up)} weights of {type(model).__name__} are missing or have other "
            f"shapes, and would be random ({', '.join(made_up[:3])}{others}): download or save the folder again"
        )


def _check_finite(source: str, model: PreTrainedModel) -> None:
    """Refuse infinite and NaN weights, which later checks would mistake for an unknown architecture."""
    broken = next((name for name, weight in model.named_parameters() if not is_finite(weight)), None)
    if broken is not None:
        raise ConfigError(
            f"model.path={source!r}: {broken} is infinite or NaN, as after a failed update: download or save the "
            "folder again, or use an earlier checkpoint"
        )


def is_finite(weight: torch.Tensor) -> bool:
    """Return whether all elements are finite."""
    return bool(weight.detach().sum(dtype=torch.float32).isfinite())
