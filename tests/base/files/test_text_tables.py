"""Tables as text: what a cell may hold, and how columns are aligned."""

from manyformer.base.files.text_tables import Table, aligned_table, markdown_table


def test_a_cell_of_markdown_ends_neither_its_column_nor_its_line() -> None:
    assert list(markdown_table(["case", "loss"], [["a|b", 1.5], ["two\nlines", "–"]], right=["loss"])) == [
        "| case | loss |",
        "| --- | ---: |",
        "| a\\|b | 1.5 |",
        "| two lines | – |",
    ]
    assert Table("scores", ["case", "loss"], [["a", "1"]]).markdown[1] == "| --- | ---: |"


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("length", "softmax"), ("64", "1.25 (2x)")]
    assert list(aligned_table(rows)) == ["length  softmax", "64      1.25 (2x)"]
    assert list(aligned_table(rows, right=True)) == ["length    softmax", "    64  1.25 (2x)"]
