"""`LeakPlace`: where a broken contract is broken, and the smallest input that shows it, as a record and as text."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, final

LeakKind = Literal["later tokens", "length", "other rows", "targets", "cache", "padding", "packing", "random numbers"]
"""What an output depends on although it should not."""


class MatrixCell(NamedTuple):
    """An output position and the position of the token that it depends on."""

    output: int
    token: int


@final
@dataclass(frozen=True)
class DependenceMatrix:
    """Which outputs change if a token is exchanged: `rows[i][j]` for output i and token j, counted from `start`.

    A row and a column stand for `bin_size` neighboring positions if the sequence is long.
    """

    rows: tuple[tuple[bool, ...], ...]
    start: int = 0
    bin_size: int = 1

    @property
    def leaks(self) -> tuple[MatrixCell, ...]:
        """The cells of outputs that depend on a later token."""
        size = len(self.rows)
        cells = ((i, j) for i in range(size) for j in range(i + 1, size) if self.rows[i][j])
        return tuple(MatrixCell(self.position(i), self.position(j)) for i, j in cells)

    def position(self, index: int) -> int:
        """The first position that a row or a column stands for."""
        return self.start + index * self.bin_size


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
        """In how many submodules of this class a change enters, or None if there is only one of them."""
        if self.layer_count < 2 or not self.layers:
            return None
        if len(self.layers) == self.layer_count:
            return f"in all {self.layer_count} {self.module_class}"
        return f"in {len(self.layers)} of {self.layer_count} {self.module_class}"

    @property
    def what(self) -> str:
        """The positions and the size of the change in one line."""
        if self.output is None:
            return f"an output depends on {self.kind}"
        size = ""
        if self.size is not None:
            size = f" by {_short(self.size)}"
        if self.relative_size is not None:
            size = f"{size} ({_short(self.relative_size)} relative)"
        told = {
            "later tokens": f"output {self.output} changes with token {self.token}{size}, {self.length} tokens",
            "length": f"output {self.output} of {self.token} tokens changes{size} if {self.length} are given",
            "other rows": f"row {self.row}, output {self.output} changes with other rows{size}",
            "targets": f"output {self.output} changes with the targets{size}",
            "cache": f"output {self.output}, a step from a cache, differs from one pass{size}",
            "padding": f"row {self.row}, output {self.output} changes with the padding{size}",
            "packing": f"output {self.output} changes with the documents in its row{size}",
            "random numbers": f"output {self.output} changes with the seed{size}",
        }[self.kind]
        return f"{told}, training" if self.training else told

    def lines(self, width: int = 80) -> list[str]:
        """The place for a table of text: two or three lines of at most `width` characters, or why there is none."""
        if self.output is None:
            return [shortened(note, width) for note in self.notes]
        details = [text for text in (self.statement, self.layers_told) if text is not None]
        told = [self.what, self.where, "; ".join(details)]
        return [shortened(line, width) for line in told if line]

    def snippet(self) -> str:
        """Python that shows the leak of `logits`, a function from tokens (b, l) to logits; empty for other kinds."""
        if not self.tokens or self.kind not in ("later tokens", "other rows"):
            return ""
        if self.kind == "later tokens":
            compared = f"[:, :{self.token}]"
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
            record["matrix"] = {"rows": rows, "start": self.matrix.start, "bin_size": self.matrix.bin_size}
        return record | {"where": self.where, "what": self.what, "snippet": self.snippet()}


def _tensor_lines(name: str, rows: tuple[tuple[int, ...], ...]) -> list[str]:
    shown = [textwrap.wrap(str(list(row)), 88, break_long_words=False) for row in rows]
    if len(shown) == 1 and len(shown[0]) == 1:
        return [f"{name} = torch.tensor([{shown[0][0]}])"]
    lines = [f"{name} = torch.tensor(["]
    for row in shown:
        row[-1] += ","
        lines += [f"    {line}" for line in row]
    return [*lines, "])"]


def shortened(line: str, width: int) -> str:
    """The line in at most `width` characters, the middle left out: a file and a statement are both worth seeing."""
    if len(line) <= width:
        return line
    head = (width - 5) * 2 // 3
    return f"{line[:head]} ... {line[len(line) - (width - 5 - head) :]}"


def _short(value: float) -> str:
    return f"{value:.1e}"
