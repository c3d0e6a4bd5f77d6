"""`LeakPlace`: where a broken contract is broken, and the smallest input that shows it, as a record and as text."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, final

LeakKind = Literal["later tokens", "length", "other rows", "targets", "cache", "padding"]
"""What an output depends on although it should not."""


class MatrixCell(NamedTuple):
    """An output position and the position of the token that it depends on."""

    output: int
    token: int


@final
@dataclass(frozen=True)
class DependenceMatrix:
    """Which outputs change if a token is exchanged: `rows[i][j]` for output i and token j.

    A row and a column stand for `bin_size` neighboring positions if the sequence is long.
    """

    rows: tuple[tuple[bool, ...], ...]
    bin_size: int = 1

    @property
    def leaks(self) -> tuple[MatrixCell, ...]:
        """The cells of outputs that depend on a later token."""
        size = len(self.rows)
        return tuple(MatrixCell(i, j) for i in range(size) for j in range(i + 1, size) if self.rows[i][j])


@final
@dataclass(frozen=True)
class LeakPlace:
    """Where an output depends on what it must not depend on; what could not be found is None, and `notes` say why.

    `output` is the first position whose output changes, and `token` the position that was exchanged; a leak through
    rows has `row` as well. `module` is the dotted name of the submodule in which the change enters, "" for the model
    itself; between two of its children, `after` and `before` name them. `file`, `line` and `code` are the statement of
    the forward in which the change is first seen. `layers` are all submodules in which one enters independently, of
    `layer_count` of that class. `tokens` and `exchanged` are the smallest input that was found, before and after the
    exchange.
    """

    kind: LeakKind
    training: bool = False
    output: int | None = None
    token: int | None = None
    row: int | None = None
    size: float | None = None
    relative_size: float | None = None
    module: str | None = None
    module_class: str | None = None
    after: str | None = None
    before: str | None = None
    file: str | None = None
    line: int | None = None
    code: str | None = None
    layers: tuple[str, ...] = ()
    layer_count: int = 0
    length: int | None = None
    tokens: tuple[tuple[int, ...], ...] = ()
    exchanged: tuple[tuple[int, ...], ...] = ()
    matrix: DependenceMatrix | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def where(self) -> str:
        """The submodule in words, such as "in the forward of blocks.3.attn (GPTAttention), after qkv, before proj"."""
        if self.module is None:
            return "the submodule was not found"
        name = self.module or "the model itself"
        if self.after is None and self.before is None:
            return f"in {name} ({self.module_class})"
        around = "".join(
            f", {word} {child}" for word, child in (("after", self.after), ("before", self.before)) if child
        )
        return f"in the forward of {name} ({self.module_class}){around}"

    @property
    def statement(self) -> str | None:
        """The file, the line and the code of the statement, or None if they were not found."""
        if self.file is None or self.line is None:
            return None
        code = f": {self.code}" if self.code else ""
        return f"{self.file}:{self.line}{code}"

    @property
    def layers_told(self) -> str | None:
        """Which of the submodules of this class are concerned, or None if it is the only one."""
        if self.layer_count < 2 or not self.layers:
            return None
        if len(self.layers) >= self.layer_count:
            return f"in all {self.layer_count} modules of this class"
        if len(self.layers) == 1:
            return f"only in {self.layers[0]}, of {self.layer_count} modules of this class"
        shown = ", ".join(self.layers[:4]) + (", ..." if len(self.layers) > 4 else "")
        return f"in {len(self.layers)} of {self.layer_count} modules of this class: {shown}"

    @property
    def what(self) -> str:
        """The positions and the size of the change in one line."""
        if self.output is None:
            return f"an output depends on {self.kind}"
        cause = self.kind
        if self.kind == "later tokens" and self.token is not None:
            cause = f"token {self.token}"
        size = ""
        if self.size is not None:
            size = f" by {_short(self.size)}"
        if self.relative_size is not None:
            size = f"{size} ({_short(self.relative_size)} of the largest)"
        row = "" if self.row is None else f"row {self.row}, "
        length = "" if self.length is None else f", {self.length} tokens"
        mode = ", training mode" if self.training else ""
        return f"{row}output {self.output} changes with {cause}{size}{length}{mode}"

    def lines(self, width: int = 80) -> list[str]:
        """The place for a table of text: two or three lines of at most `width` characters."""
        where = self.where
        if self.layers_told is not None:
            where = f"{where}, {self.layers_told}"
        told = [self.what, where]
        if self.statement is not None:
            told.append(self.statement)
        return [textwrap.shorten(line, width, placeholder=" ...") if " " in line else line[:width] for line in told]

    def snippet(self) -> str:
        """Python that shows the leak of `logits`, a function from tokens (b, l) to logits; empty for other kinds."""
        if not self.tokens or self.kind not in ("later tokens", "other rows"):
            return ""
        if self.kind == "later tokens":
            compared = f"[:, : {self.token}]"
        else:
            compared = f"[{self.row}]"
        return "\n".join(
            (
                "import torch",
                "",
                *_tensor_lines("tokens", self.tokens),
                *_tensor_lines("exchanged", self.exchanged),
                "with torch.no_grad():",
                "    change = (logits(exchanged) - logits(tokens)).abs().amax(-1)",
                f"print(change{compared})  # all zero in a sound model",
            )
        )

    def as_json(self) -> dict[str, Any]:
        """The record for JSON, with the sentences that are made of it."""
        record = asdict(self)
        for key in ("size", "relative_size"):
            if record[key] is not None and not math.isfinite(record[key]):
                record[key] = str(record[key])
        if self.matrix is not None:
            rows = ["".join("1" if cell else "0" for cell in row) for row in self.matrix.rows]
            record["matrix"] = {"rows": rows, "bin_size": self.matrix.bin_size}
        return record | {"where": self.where, "what": self.what, "snippet": self.snippet()}


def _tensor_lines(name: str, rows: tuple[tuple[int, ...], ...]) -> list[str]:
    shown = [textwrap.wrap(str(list(row)), 96, break_long_words=False) for row in rows]
    lines = [f"{name} = torch.tensor(", "    ["]
    for row in shown:
        row[-1] += ","
        lines += [f"        {line}" for line in row]
    return [*lines, "    ]", ")"]


def _short(value: float) -> str:
    return f"{value:.1e}"
