"""The records of a sparse plan: attention calls for groups of heads, their tokens in order, blocks and inner masks."""

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.masks import Mask
from manyformer.ops.block_cover import BlockOrder
from manyformer.ops.plan_search import PartChoice


class BlockTiles(NamedTuple):
    """Query blocks with equally many key blocks.

    `step` is by how many blocks the first key block moves per row, where rows and the key blocks of a row are
    contiguous and nothing has to be gathered. `inner` is the mask within the blocks, where needed, of a single row if
    all rows have the same; `rows_without_keys` are its queries without a visible key. `shorter_rows` are pairs of a row
    and its number of key blocks, where that is smaller. `rows_adjacent`: whether the rows are consecutive.
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, "n m"]
    step: int | None
    inner: Bool[Tensor, "r c s"] | None
    rows_without_keys: Bool[Tensor, "r c"] | None
    shorter_rows: tuple[tuple[int, int], ...]
    rows_adjacent: bool

    @property
    def same_keys(self) -> bool:
        """Whether all rows attend to the same keys without an inner mask."""
        return self.step == 0 and self.inner is None


class MaskPart(NamedTuple):
    """Queries, keys and the visible pairs among them; no pair is in two parts.

    If it `is_exclusive`, none of its queries is in another part: there is nothing to merge.
    """

    mask: Mask
    q: BlockOrder
    k: BlockOrder
    tiles: tuple[BlockTiles, ...]
    is_exclusive: bool


class PlanRecipe(NamedTuple):
    """Block sizes, and the parts of each distinct head mask, from which a plan is made."""

    sizes: tuple[int, ...]
    parts: tuple[PartChoice, ...]


class HeadGroup(NamedTuple):
    """Heads with equal masks, and the parts of that mask."""

    heads: tuple[int, ...]
    parts: tuple[MaskPart, ...]

    @property
    def num_pairs(self) -> int:
        """Number of computed (head, query, key) triples."""
        blocks = ((part.q.size * part.k.size, tiles.columns.numel()) for part in self.parts for tiles in part.tiles)
        return len(self.heads) * sum(size * count for size, count in blocks)

    @property
    def num_gathered(self) -> int:
        """Number of gathered (head, key) pairs."""
        tiles = ((part.k.size, tiles) for part in self.parts for tiles in part.tiles if tiles.step is None)
        return len(self.heads) * sum(size * group_tiles.columns.numel() for size, group_tiles in tiles)


class SparsePlan(NamedTuple):
    """The calls for each row of the batch, or one entry for all rows; `cost` in (head, query, key) triples per row."""

    rows: tuple[tuple[HeadGroup, ...], ...]
    cost: float

    def num_pairs(self, batch: int) -> int:
        """Number of computed (head, query, key) triples for `batch` rows."""
        per_row = [sum(group.num_pairs for group in groups) for groups in self.rows]
        return sum(per_row[row % len(per_row)] for row in range(batch))

    def num_gathered(self, batch: int) -> int:
        """Number of gathered (head, key) pairs for `batch` rows."""
        per_row = [sum(group.num_gathered for group in groups) for groups in self.rows]
        return sum(per_row[row % len(per_row)] for row in range(batch))

    def describe(self) -> str:
        """One sentence on what is computed."""
        group = None
        if self.rows and self.rows[0]:
            group = self.rows[0][0]
        if group is None:
            return "nothing is visible"
        parts = " + ".join(_describe_part(part) for part in group.parts)
        num_more = len(self.rows[0]) - 1
        return parts + (f", and {num_more} more kinds of heads" if num_more else "")


def _describe_part(part: MaskPart) -> str:
    size = f"{part.q.size} x {part.k.size}"
    if part.q.is_identity and part.k.is_identity:
        return f"blocks of {size}"
    covers_all = part.q.num_tokens == part.q.blocks.numel() and part.k.num_tokens == part.k.blocks.numel()
    return f"blocks of {size} among {'sorted' if covers_all else 'chosen'} tokens"
