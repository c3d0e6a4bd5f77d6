"""Tables in Markdown, for the pages that are generated."""

from collections.abc import Container, Iterable, Iterator


def table(heads: Iterable[str], rows: Iterable[Iterable[object]], right: Container[str] = ()) -> Iterator[str]:
    """The lines of a table; columns whose head is in `right` are aligned to the right."""
    heads = tuple(heads)
    for row in (heads, ["---:" if head in right else "---" for head in heads], *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
