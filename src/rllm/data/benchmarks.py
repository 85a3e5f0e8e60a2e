"""Benchmarks by name: where their rows are, how a row becomes a task, what is asked, and how the answer is scored.

`rllm eval gsm8k --model ...` evaluates on one, `rllm train gsm8k --model ...` trains on one that has a training split,
and `python -m rllm.data.prepare gsm8k` stores its tasks. Nothing heavy is imported here: scorers are import paths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from rllm.data import benchmark_rows as rows
from rllm.data.benchmark_rows import arithmetic_task, countdown_task, distinct_tasks
from rllm.data.sources import hub_files, read_file, read_hub
from rllm.errors import ConfigError
from rllm.types import JSONMapping, Message, Task

NUM_GENERATED: Mapping[str, int] = MappingProxyType({"test": 100, "train": 1000})
"""Tasks of each split of a benchmark that is generated."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark. The default agent asks for each task once, with the question, documents and instruction."""

    about: str
    """One line for lists."""
    hub_id: str | None = None
    """Dataset on the Hugging Face hub; `None` if tasks are generated."""
    subsets: tuple[str | None, ...] = (None,)
    """Subsets of the dataset, read one after the other; several are shuffled."""
    files: tuple[str, ...] = ()
    """Files of the dataset to read instead; those in folders are read with the others."""
    read_file: Callable[[Path], list[Task]] = read_file
    """Reader of such a file, and of one that the user passes."""
    splits: Mapping[str, str] = field(default_factory=lambda: {"test": "test"})
    """Splits of the dataset, by our names `test` and `train`."""
    to_task: Callable[[Task], Task] = dict
    """Conversion of a row to a task."""
    generate: Callable[[random.Random], Task] | None = None
    """Function that draws a task, if there is no dataset."""
    instruction: str = ""
    """Text below the question."""
    reward: str
    """Import path of the scorer."""
    check: str | None = None
    """Import path of a function that raises if a package of the scorer is missing."""
    metric: str = "accuracy"
    """Meaning of the accuracy in the report."""
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics of the report that are the ratio of two means."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of an evaluation, unless the user sets others; the authors' values where they state them."""


_MATH = Benchmark(
    about="",
    instruction="Think step by step, and put the final answer in \\boxed{}.",
    reward="rllm.rewards.reward_fn:math_reward_fn",
    check="rllm.rewards.math_reward:check_installed",
    metric="equal as mathematics",
    sampling={"temperature": 0.0, "max_tokens": 2048},
)
_AIME = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32768}
_CHOICE = Benchmark(
    about="",
    instruction='Think step by step, and end with a line "Answer: X", where X is the letter of your choice.',
    reward="rllm.rewards.reward_fn:multiple_choice_reward_fn",
    metric="right letter",
    sampling={"temperature": 0.0, "max_tokens": 2048},
)
_QUESTION = Benchmark(
    about="",
    instruction='Reply with one line, "Answer: ...", that has the shortest possible answer.',
    reward="rllm.rewards.reward_fn:search_reward_fn",
    metric="exact match",
    sampling={"temperature": 0.0, "max_tokens": 256},
)
_CODE = Benchmark(
    about="",
    instruction="Reply with the whole program in one block of Python (```python ... ```).",
    reward="rllm.rewards.reward_fn:code_reward_fn",
    metric="all tests pass",
    sampling={"temperature": 0.0, "max_tokens": 1024},
)
_BOTH = {"test": "test", "train": "train"}
_VALIDATION = {"test": "validation", "train": "train"}  # where the answers of the test split are secret
_BFCL = tuple(
    f"BFCL_v3_{category}.json" for category in ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
)

BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": replace(
        _MATH,
        about="word problems of primary school (arXiv:2110.14168)",
        hub_id="openai/gsm8k",
        subsets=("main",),
        splits=_BOTH,
        to_task=rows.gsm8k_task,
        sampling={"temperature": 0.0, "max_tokens": 1024},
    ),
    "svamp": replace(
        _MATH,
        about="word problems with small changes that mislead (arXiv:2103.07191)",
        hub_id="ChilleD/SVAMP",
        splits=_BOTH,
        to_task=rows.svamp_task,
        sampling={"temperature": 0.0, "max_tokens": 1024},
    ),
    "math500": replace(
        _MATH,
        about="500 problems of MATH (arXiv:2305.20050)",
        hub_id="HuggingFaceH4/MATH-500",
        to_task=rows.short_answer("problem"),
    ),
    "hendrycks_math": replace(
        _MATH,
        about="MATH: competition problems of seven subjects (arXiv:2103.03874)",
        hub_id="EleutherAI/hendrycks_math",
        subsets=(
            "algebra",
            "counting_and_probability",
            "geometry",
            "intermediate_algebra",
            "number_theory",
            "prealgebra",
            "precalculus",
        ),
        splits=_BOTH,
        to_task=rows.hendrycks_task,
    ),
    "aime24": replace(
        _MATH,
        about="American Invitational Mathematics Examination of 2024, 30 problems",
        hub_id="HuggingFaceH4/aime_2024",
        splits={"test": "train"},
        to_task=rows.short_answer("problem"),
        sampling=_AIME,
    ),
    "aime25": replace(
        _MATH,
        about="American Invitational Mathematics Examination of 2025, 30 problems",
        hub_id="math-ai/aime25",
        to_task=rows.short_answer("problem"),
        sampling=_AIME,
    ),
    "amc23": replace(
        _MATH,
        about="American Mathematics Competitions of 2023, 40 problems",
        hub_id="math-ai/amc23",
        to_task=rows.short_answer(),
    ),
    "gpqa": replace(
        _CHOICE,
        about="198 questions of graduate science, the diamond set (arXiv:2311.12022); the dataset needs a login",
        hub_id="Idavidrein/gpqa",
        subsets=("gpqa_diamond",),
        splits={"test": "train"},
        to_task=rows.gpqa_task,
        sampling={"temperature": 0.0, "max_tokens": 4096},
    ),
    "mmlu": replace(
        _CHOICE,
        about="57 school and university subjects (arXiv:2009.03300)",
        hub_id="cais/mmlu",
        subsets=("all",),
        splits={"test": "test", "train": "auxiliary_train"},
        to_task=rows.numbered_choices(),
    ),
    "mmlu-pro": replace(
        _CHOICE,
        about="14 subjects with up to ten choices (arXiv:2406.01574)",
        hub_id="TIGER-Lab/MMLU-Pro",
        to_task=rows.numbered_choices("options", "answer_index"),
    ),
    "arc-challenge": replace(
        _CHOICE,
        about="school science that retrieval does not answer (arXiv:1803.05457)",
        hub_id="allenai/ai2_arc",
        subsets=("ARC-Challenge",),
        splits=_BOTH,
        to_task=rows.labelled_choices(),
    ),
    "commonsense_qa": replace(
        _CHOICE,
        about="everyday knowledge, five choices (arXiv:1811.00937)",
        hub_id="tau/commonsense_qa",
        splits=_VALIDATION,
        to_task=rows.labelled_choices(),
    ),
    "openbookqa": replace(
        _CHOICE,
        about="elementary science with everyday knowledge (arXiv:1809.02789)",
        hub_id="allenai/openbookqa",
        subsets=("main",),
        splits=_BOTH,
        to_task=rows.labelled_choices("question_stem"),
    ),
    "hellaswag": replace(
        _CHOICE,
        about="the ending of a description (arXiv:1905.07830)",
        hub_id="Rowan/hellaswag",
        splits=_VALIDATION,
        to_task=rows.hellaswag_task,
    ),
    "winogrande": replace(
        _CHOICE,
        about="the noun that a pronoun means (arXiv:1907.10641)",
        hub_id="allenai/winogrande",
        subsets=("winogrande_xl",),
        splits=_VALIDATION,
        to_task=rows.winogrande_task,
    ),
    "hotpotqa": replace(
        _QUESTION,
        about="questions over two of ten documents (arXiv:1809.09600)",
        hub_id="hotpotqa/hotpot_qa",
        subsets=("distractor",),
        splits=_VALIDATION,
        to_task=rows.hotpotqa_task,
    ),
    "squad": replace(
        _QUESTION,
        about="questions about a passage of Wikipedia (arXiv:1606.05250)",
        hub_id="rajpurkar/squad",
        splits=_VALIDATION,
        to_task=rows.squad_task,
    ),
    "triviaqa": replace(
        _QUESTION,
        about="trivia without documents (arXiv:1705.03551)",
        hub_id="mandarjoshi/trivia_qa",
        subsets=("rc.nocontext",),
        splits=_VALIDATION,
        to_task=rows.triviaqa_task,
    ),
    "nq_open": replace(
        _QUESTION,
        about="questions of Google's users without documents (arXiv:1906.00300)",
        hub_id="google-research-datasets/nq_open",
        splits=_VALIDATION,
        to_task=rows.short_answer(),
    ),
    "boolq": replace(
        _QUESTION,
        about="yes or no about a passage (arXiv:1905.10044)",
        hub_id="google/boolq",
        splits=_VALIDATION,
        to_task=rows.boolq_task,
    ),
    "ifeval": Benchmark(
        about="instructions that a program can check, 25 kinds (arXiv:2311.07911)",
        hub_id="google/IFEval",
        splits={"test": "train"},
        to_task=rows.ifeval_task,
        reward="rllm.rewards.ifeval_reward:ifeval_reward_fn",
        check="rllm.rewards.ifeval_reward:check_installed",
        metric="all instructions followed, strict",
        ratios={
            "accuracy of instructions": ("followed", "instructions"),
            "accuracy of instructions, loose": ("followed_loose", "instructions"),
        },
        sampling={"temperature": 0.0, "max_tokens": 1280},
    ),
    "humaneval": replace(
        _CODE,
        about="164 functions to complete (arXiv:2107.03374)",
        hub_id="openai/openai_humaneval",
        to_task=rows.humaneval_task,
        sampling={"temperature": 0.2, "max_tokens": 1024},
    ),
    "mbpp": replace(
        _CODE,
        about="short programs for beginners (arXiv:2108.07732)",
        hub_id="google-research-datasets/mbpp",
        subsets=("full",),
        splits=_BOTH,
        to_task=rows.mbpp_task,
    ),
    "bfcl": Benchmark(
        about="function calls: one, one of several, several, none (gorilla.cs.berkeley.edu)",
        hub_id="gorilla-llm/Berkeley-Function-Calling-Leaderboard",
        files=(*_BFCL, *(f"{rows.ANSWERS}/{file}" for file in _BFCL if "irrelevance" not in file)),
        read_file=rows.read_bfcl,
        to_task=rows.bfcl_task,
        reward="rllm.rewards.function_call_reward:function_call_reward_fn",
        metric="accepted calls",
        sampling={"temperature": 0.001, "max_tokens": 4096},
    ),
    "countdown": Benchmark(
        about="an expression of given numbers that equals a target; generated",
        splits=_BOTH,
        generate=countdown_task,
        instruction="Think step by step, and end with the expression in <answer> and </answer>.",
        reward="rllm.rewards.countdown_reward:countdown_reward_fn",
        metric="the value is right",
        sampling={"temperature": 0.0, "max_tokens": 1024},
    ),
    "arithmetic": replace(
        _MATH,
        about="sums and products of small numbers; generated",
        splits=_BOTH,
        generate=arithmetic_task,
        sampling={"temperature": 0.0, "max_tokens": 512},
    ),
}
"""Benchmarks by name."""


def read_benchmark(name: str, split: str = "test", *, limit: int = 0) -> list[Task]:
    """Return the tasks of a benchmark's split: the first `limit`, or all for 0.

    Raises:
        ConfigError: if the split is unknown, the hub cannot be reached, or a row has another form.
        MissingDependencyError: without `datasets`.
    """
    benchmark = BENCHMARKS[name]
    if limit < 0:
        raise ConfigError(f"{split}={limit}: use the largest number of rows to take, or 0 for all")
    if split not in benchmark.splits:
        raise ConfigError(f"split={split!r}: dataset {name!r} has the splits {', '.join(sorted(benchmark.splits))}")
    if (generate := benchmark.generate) is not None:
        tasks = distinct_tasks(lambda rng, _: generate(rng), sum(NUM_GENERATED.values()), seed=0)
        held_out = NUM_GENERATED["test"]
        return (tasks[held_out:] if split == "train" else tasks[:held_out])[: limit or None]
    try:
        found = _rows_on_hub(benchmark, split, limit)
    except ConfigError as error:
        reason = "reached" if isinstance(error.__cause__, ConnectionError) else f"read ({error})"
        raise ConfigError(
            f"benchmark {name!r} is the dataset {benchmark.hub_id!r} on the Hugging Face hub, which cannot be {reason}"
            ": pass a file with its rows as --data FILE, or load it once where the hub can be reached"
        ) from error
    tasks = _converted(name, found, f"{benchmark.hub_id} ({split})")
    if len(benchmark.subsets) > 1:
        random.Random(0).shuffle(tasks)
    return tasks[: limit or None]


def _rows_on_hub(benchmark: Benchmark, split: str, limit: int) -> list[Task]:
    source, name = str(benchmark.hub_id), benchmark.splits[split]
    if benchmark.files:
        files = hub_files(source, benchmark.files)
        return [
            row
            for file, path in zip(benchmark.files, files, strict=True)
            if "/" not in file
            for row in benchmark.read_file(path)
        ]
    return [row for subset in benchmark.subsets for row in read_hub(source, split=name, subset=subset, limit=limit)]


def read_benchmark_file(name: str, source: str | Path) -> list[Task]:
    """Return the tasks of a file whose rows have the fields of the benchmark's dataset.

    Raises:
        ConfigError: if the file cannot be read, or a row has another form.
    """
    return _converted(name, BENCHMARKS[name].read_file(Path(source).expanduser()), str(source))


def _converted(name: str, found: Iterable[Task], source: str) -> list[Task]:
    to_task, tasks = BENCHMARKS[name].to_task, []
    for index, row in enumerate(found):
        where = f"row {index} of {source}"
        try:
            tasks.append({**to_task(row), "data_source": name})
        except KeyError as error:
            fields = ", ".join(row)
            raise ConfigError(f"{where} has no field {error}, only {fields}: has the dataset changed?") from error
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{where}: {error}") from error
    return tasks


def messages_of(benchmark: Benchmark, task: JSONMapping) -> list[Message]:
    """Return the messages for the model: the task's own, or its documents, question and instruction."""
    if task.get("messages"):
        return list(task["messages"])
    documents = [f"{item['title']}\n{item['text']}".strip() for item in task.get("context") or ()]
    return [{"role": "user", "content": "\n\n".join([*documents, task["question"], benchmark.instruction]).strip()}]
