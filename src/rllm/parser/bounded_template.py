"""Chat templates rendered within bounds: they come with models, and a loop in one could run forever.

The environment is the one of transformers, with a budget for each rendering. Every loop and every call takes from it,
and so does everything whose cost grows with a value: operators, filters, comparisons, printing. The size of a value is
checked before it is created.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, Sized, ValuesView
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rllm.errors import ConfigError
from rllm.parser.decoding import Tokenizer
from rllm.types import JSONMapping, Message

MAX_STEPS = 10_000_000
"""Passes of loops, operations, and each 1,024 characters or 64 values that one reads: some ten seconds."""
_CALL = 10
"""Steps of a call, such as a call of a macro."""
MAX_SIZE = 64 * 1024 * 1024
"""Characters of a text, or values in a list with all that they hold, that a template may make."""
_MAX_PRINTED = 4 * MAX_SIZE
"""Limit of text printed into a variable or by a macro, which is often printed again."""
_MOST_KEPT = 1_000_000
_MAX_DIGITS = 10_000
_MAX_TEMPLATE = 200_000
"""Characters of a template, whose code takes 1,000 bytes for each; the longest known has 30,000."""
_MAX_WIDTH = 100_000
_WIDTH = re.compile(r"\d{6,}|\*")
T = TypeVar("T")
_ATOMS = (bool, int, float, type(None))


class TemplateLimitError(ConfigError):
    """A chat template exceeds a limit that no useful rendering needs."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the chat template {what}: name another template with model.chat_template=PATH")


def render_bounded(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[JSONMapping] | None, options: JSONMapping
) -> str:
    """Return what `tokenizer.apply_chat_template` gives for these messages, as text.

    A tokenizer with another way to apply its template than transformers' is left to it.

    Raises:
        TemplateLimitError: if the template does not end within its bounds.
        Exception: whatever else the template raises.
    """
    apply = getattr(tokenizer, "apply_chat_template", None)
    if getattr(apply, "__module__", "") != "transformers.tokenization_utils_base":
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return text
    template = _compiled(tokenizer.get_chat_template(None, tools))
    values = {"documents": None, "add_generation_prompt": False, **tokenizer.special_tokens_map, **options}
    token = _BUDGET.set(_Budget())
    try:
        text = template.render(messages=messages, tools=tools, **values)
    except MemoryError:
        raise TemplateLimitError("runs out of memory") from None
    finally:
        _BUDGET.reset(token)
    return text


class _Budget:
    """Remaining budget of one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._printed = 0
        self._sizes: dict[int, tuple[object, int]] = {}
        """Containers with their sizes, by id. A template cannot change them; they are kept, so that ids stay unique."""
        self._num_kept = 0

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TemplateLimitError(f"takes more than {MAX_STEPS:,} steps for one conversation")

    def check(self, size: int) -> None:
        """Refuse to make a value of this size."""
        if size > MAX_SIZE:
            raise TemplateLimitError(f"makes a value of more than {MAX_SIZE:,} characters or parts")

    def size(self, value: object) -> int:
        """Return the characters of a text, or the number of values in a container, repeated ones included."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, dict):
            return self._size_of(value, chain(value, value.values()))
        if isinstance(value, list | tuple):
            return self._size_of(value, value)
        return self._size_of(value, [*value]) if isinstance(value, KeysView | ValuesView | ItemsView) else 1

    def _size_of(self, container: Sized, items: Iterable[object]) -> int:
        known = self._sizes.get(id(container))
        if known is None:
            size = 1 + sum(1 if isinstance(item, _ATOMS) else self.size(item) for item in items)
            self.spend(1 + len(container) // 8)
            self._num_kept += 1 + len(container)
            if self._num_kept > _MOST_KEPT:
                self._sizes.clear()
                self._num_kept = 0
            known = self._sizes[id(container)] = container, size
        return known[1]

    def use(self, value: T) -> T:
        """Charge the cost of reading a value, and return the value."""
        if not isinstance(value, _ATOMS):
            size = self.size(value)
            if size > 1024:
                self.check(size)
                self.spend(size // (1024 if isinstance(value, str) else 64))
        return value

    def printed(self, value: T) -> T:
        """Charge the cost of printing a value, and return the value."""
        self._printed += 1 if isinstance(value, _ATOMS) else self.size(value)
        if self._printed > _MAX_PRINTED:
            raise TemplateLimitError(f"prints more than {_MAX_PRINTED:,} characters")
        return value


_BUDGET: ContextVar[_Budget] = ContextVar("the budget of a rendering")


def _concat(values: Sequence[object]) -> str:
    """Apply the operator `~`."""
    budget = _BUDGET.get()
    budget.check(sum(map(budget.size, values)))
    return "".join(map(str, map(budget.use, values)))


def _counted(values: Iterable[T]) -> Iterator[T]:
    spend = _BUDGET.get().spend
    for value in values:
        spend(1)
        yield value


class _Bounds(NodeTransformer):
    """Inserts the checks of the budget into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "rllm_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "rllm_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _unless_constant(node.expr)
        for operand in node.ops:
            operand.expr = _unless_constant(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "rllm_use")
        return node


def _unless_constant(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "rllm_use")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        budget = _BUDGET.get()
        budget.spend(1)
        if isinstance(left, _ATOMS) and isinstance(right, _ATOMS):
            if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > _MAX_DIGITS:
                    raise TemplateLimitError("works with numbers of thousands of digits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and times > 0:
                    budget.check(budget.size(value) * times)
        elif operator == "%" and isinstance(left, str):
            budget.check(_size_of_format([left], budget.size(left) + budget.size(right)))
        elif operator == "+":
            budget.check(budget.size(left) + budget.size(right))
        budget.use(left)
        budget.use(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: object) -> object:
        budget = _BUDGET.get()
        budget.spend(_CALL)
        if isinstance(called, LoopContext):
            args = tuple(_counted(value) for value in args)
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)  # the sandbox wraps `format`
        value = [owner] if isinstance(owner, str | bytes | list | tuple | dict) else []
        _check_call(budget, getattr(called, "__name__", ""), value, [*args, *kwargs.values()])
        return budget.use(super().call(context, called, *args, **kwargs))


def _check_call(budget: _Budget, name: str, value: Sequence[object], arguments: Sequence[object]) -> None:
    """Check a call of a method or a filter before it is made: what it reads, and how large a text it makes.

    `value` holds the object of the method or the input of the filter. It is never a width, so numbers of any size are
    allowed there, as tool calls have them.
    """
    given = [*value, *arguments]
    for each in given:
        budget.use(each)
    if name in _SIZED_BY_NUMBERS and any(isinstance(each, int) and each > _MAX_WIDTH for each in arguments):
        raise TemplateLimitError(f"calls {name} with a number above {_MAX_WIDTH:,}")
    if name in _TAKE_CHARACTERS and given and isinstance(given[0], str):
        budget.spend(len(given[0]))
    if name in _MAKE_MORE:
        budget.check(_MAKE_MORE[name](given, sum(map(budget.size, given))))


def _size_of_format(given: Sequence[object], size: int) -> int:
    text = str(given[0]) if given else ""
    if _WIDTH.search(text):
        raise TemplateLimitError("formats a text with a width of its own")
    return size * (1 + text.count("{") + text.count("%"))


def _size_of_replacement(given: Sequence[object], size: int) -> int:
    text, old, new = map(str, (*given, "", "", "")[:3])
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _size_of_indented(given: Sequence[object], size: int) -> int:
    widths = [value if isinstance(value, int) else len(value) for value in given[1:] if isinstance(value, int | str)]
    return size * (1 + max(widths, default=0))


_SIZED_BY_NUMBERS = frozenset(
    "center ljust rjust zfill expandtabs indent tojson wordwrap round batch slice truncate".split()
)
_TAKE_CHARACTERS = frozenset(("list", "sort", "unique", "batch", "slice", "map", "select", "reject", "groupby"))
"""Filters that take a text apart into its characters, each of which takes as much memory as a hundred."""
_MAKE_MORE: dict[str, Callable[[Sequence[Any], int], int]] = {
    **dict.fromkeys(("format", "format_map"), _size_of_format),
    "replace": _size_of_replacement,
    "join": lambda given, size: size * (1 + max((len(value) for value in given if isinstance(value, str)), default=0)),
    "sum": lambda given, size: (
        # lists that are added are copied again for each item
        size if all(isinstance(value, (*_ATOMS, str)) for value in given[1:]) else size * len(given[0])
    ),
    "translate": lambda given, size: len(given[0]) * size if given else 0,
    "strftime_now": lambda given, size: size * 256,  # the C library pads to any width
    "int": lambda given, size: size * _MAX_DIGITS,  # with a base, of any length
    "wordwrap": lambda given, size: size * _MAX_DIGITS,  # of quadratic time for a long word
    **dict.fromkeys(("indent", "tojson", "expandtabs"), _size_of_indented),
}
"""Sizes of the texts that these methods and filters create from their arguments."""


def _filter_within(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that is charged to the budget; values that it yields are made at once and measured."""
    num_passed = int(hasattr(function, "jinja_pass_arg"))
    name = function.__name__.removeprefix("sync_").removeprefix("do_")

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.spend(1)
        value, arguments = args[num_passed : num_passed + 1], args[num_passed + 1 :]
        _check_call(budget, name, value, [*arguments, *kwargs.values()])
        made = function(*args, **kwargs)
        return budget.use(list(_counted(made)) if isinstance(made, Iterator) else made)

    return bounded


@lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    from transformers.utils import chat_template_utils

    if len(text) > _MAX_TEMPLATE:
        raise TemplateLimitError(f"has more than {_MAX_TEMPLATE:,} characters")
    # A new environment with the filters and extensions of transformers, because its class is changed.
    environment = chat_template_utils._compile_jinja_template.__wrapped__("").environment
    environment.__class__ = _BoundedEnvironment
    for known in (environment.filters, environment.tests):
        known.update({name: _filter_within(function) for name, function in known.items()})
    environment.filters |= {
        "rllm_counted": _counted,
        "rllm_use": lambda value: _BUDGET.get().use(value),
        "rllm_concat": _concat,
    }
    environment.globals.pop("lipsum", None)
    environment.finalize = lambda value: _BUDGET.get().printed(value)
    return environment.from_string(text)
