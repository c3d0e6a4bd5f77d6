"""The number of edits between two sequences."""

from collections.abc import Sequence


def edit_distance(sequence: Sequence[object], reference: Sequence[object]) -> int:
    """The least number of items to insert, delete or replace to turn one into the other (Levenshtein 1966)."""
    distances = list(range(len(reference) + 1))
    for row, item in enumerate(sequence, 1):
        diagonal = distances[0]
        distances[0] = row
        for column, other in enumerate(reference, 1):
            replaced = diagonal + (item != other)
            diagonal = distances[column]
            distances[column] = min(replaced, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]
