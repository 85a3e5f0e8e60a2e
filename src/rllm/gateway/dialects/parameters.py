"""Effect of the documented fields of each dialect, with the embedded engine and with a server.

`docs/parameters.md` prints the tables. A fate of `=KEY` is that of the chat field that the field is translated to. A
field with the fate `=` is sent to the server unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rllm.gateway.dialects import DIALECTS
from rllm.inference.parameters import CHAT, NAMED, PASSED_ON, Row, Table, field_of

TABLES: Mapping[str, Table] = {dialect.wire.name: dialect.parameters for dialect in DIALECTS}


def rows(dialect: str) -> Iterator[Row]:
    """Yield the rows of a dialect, each with its fates on the embedded engine and on a server."""
    for row in TABLES[dialect].rows.values():
        if dialect == "chat":
            forwarded = "translated" if row.key == "tool_choice[allowed_tools]" else PASSED_ON
            yield Row(key=row.key, fates=(*row.fates, forwarded), remark=row.remark)
            continue
        embedded, forwarded = row.fates
        source = CHAT.rows[embedded[1:]] if embedded.startswith("=") else None
        forwarded = PASSED_ON if forwarded.startswith("=") else forwarded
        remark = row.remark or (source.remark if source else "")
        yield Row(key=row.key, fates=(source.fates[0] if source else embedded, forwarded), remark=remark)


def left_out(dialect: str, asked: Mapping[str, object]) -> list[str]:
    """Return the keys of the fields that a dialect ignores, whichever server answers."""
    if dialect == "chat":
        return []
    rows = TABLES[dialect].rows_in(asked)
    return [key for key, row in rows.items() if (row.fates[1] == NAMED if row else key != field_of(key))]
