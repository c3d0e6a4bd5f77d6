"""What computations cost on the machine that the library was tuned on: every constant that depends on hardware.

Values decide which exact path computes a call, and in what blocks; block sizes also decide the order of sums, so that
a change of theirs changes the last digits of results. `benchmarks/measure_costs.py` measures what time decides
(`measured`); what memory decides was chosen (`budget`). The date is the day on which the value entered. The costs of
calls can be measured on another machine in seconds (`manyformer doctor --tune`, `manyformer/costs/tuned_costs.py`).
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from manyformer.costs.tuned_costs import CostsInUse, read_tuned_costs


def measured(value: object, unit: str, date: str) -> Any:
    """A field whose best value follows from times."""
    return field(default=value, metadata={"unit": unit, "date": date, "measured": True})


def budget(value: object, unit: str, date: str) -> Any:
    """A field that limits memory or the number of things that are cached."""
    return field(default=value, metadata={"unit": unit, "date": date, "measured": False})


@dataclass(frozen=True, slots=True)
class CostModel:
    """Sizes and costs in the unit of each field; pairs are (query, key) pairs of one head, the unit of work."""

    attention_call: int = measured(20_000, "pairs", "2026-11-21")
    """Overhead of one attention call on a CPU, in (head, query, key) pairs."""
    min_planned_pairs: int = measured(1 << 17, "pairs", "2026-11-21")
    """With fewer (query, key) pairs, planning costs more than skipping masked blocks saves."""
    min_row_plan_pairs: int = measured(1 << 20, "pairs", "2026-11-26")
    """The same for the pairs of all heads in a row that needs a plan of its own, because rows of tokens differ."""
    short_document_rounding: int = measured(32, "tokens", "2026-11-21")
    """Under a causal mask the length of a document is padded to a multiple of this: equal lengths share a mask."""
    long_document_rounding: int = measured(128, "tokens", "2026-11-21")
    """The same from `min_planned_pairs` pairs on, where equal lengths share a plan."""
    max_reference_pairs: int = measured(128 * 128, "pairs", "2026-11-21")
    """At most this many (query, key) pairs use the reference computation of a position that acts on scores."""
    max_reference_queries: int = measured(16, "queries", "2026-11-21")
    """At most this many queries use it, whatever the number of keys."""
    max_band_distance: int = measured(1024, "distances", "2026-11-21")
    """A position with at least this many distances is computed in blocks: the band would be too wide."""
    min_document_length: int = measured(64, "tokens", "2026-11-21")
    """Packed documents of fewer tokens on average are cheaper in one masked call than in one call each."""
    max_reference_span_queries: int = measured(16, "queries", "2026-11-21")
    """At most this many queries of adaptive spans use the reference computation: a block of the band is larger."""
    max_rotated_queries: int = budget(16, "queries", "2026-11-21")
    """Queries per kernel call for each of which all keys are rotated separately."""
    forget_gate_block: int = budget(128, "queries", "2026-11-23")
    """Queries of one fused call with forget gates, whose sums are counted from its first token to stay exact."""
    max_block_choice_queries: int = budget(64, "queries", "2026-11-23")
    """Queries of one chosen block of keys that are computed together; the last ones of a block are padded."""
    token_choice_elements: int = budget(1 << 22, "elements", "2026-11-24")
    """Gathered numbers, or products of an index, that are held at a time where each query attends to chosen tokens."""
    min_buffer_columns: int = measured(16, "tokens", "2026-11-21")
    """The smallest number of free columns in a new buffer."""

    pair_rates: tuple[tuple[int, float], ...] = measured(((64, 1.1), (128, 1.0), (256, 1.0)), "pairs", "2026-11-21")
    """Block size, and the cost of a (query, key) pair in blocks of this size relative to large blocks."""
    masked_pair: float = measured(0.1, "pairs", "2026-11-21")
    """Additional cost of a pair where an inner mask is added to the scores."""
    sparse_call: int = measured(8_000, "pairs", "2026-11-21")
    """Cost of a call, forward and backward."""
    merged_token: int = measured(12, "pairs", "2026-11-21")
    """Cost of merging one token's outputs of two parts."""
    gathered_key: int = measured(8, "pairs", "2026-11-21")
    """Cost of gathering one key for a block of queries, and of scattering its gradient."""
    max_selected_share: float = measured(7 / 8, "share", "2026-11-21")
    """A part that involves more than this share of all tokens uses all: selecting some would cost more."""
    sparse_block: int = measured(128, "tokens", "2026-11-21")
    """Block size where searching for the best one would cost more than it gains."""
    pairs_per_mask: int = measured(1 << 20, "pairs", "2026-11-21")
    """Inner masks are evaluated for this many pairs at a time."""
    max_cached_plans: int = budget(512, "plans", "2026-11-21")
    """Cached plans for rows of one document: a few masks times many document lengths."""
    cover_coarsening: int = measured(8, "blocks", "2026-11-21")
    """Blocks per group of the next coarser level: a group with no visible pair is never refined."""
    max_view_calls: int = measured(2, "calls", "2026-11-21")
    """Up to this many calls on views are faster than one call on gathered keys."""
    max_padding_share: float = measured(1 / 8, "share", "2026-11-21")
    """Rows with fewer key blocks share a call while padding is at most this share of its key blocks."""
    saved_sparse_weights: int = budget(1 << 26, "elements", "2026-11-21")
    """Up to this many weights, 256 MB, are saved for the gradient, which saves a sixth of the time."""
    saved_gathered_elements: int = budget(1 << 24, "elements", "2026-11-21")
    """Up to this many elements of gathered keys and values, 64 MB, are saved for the gradient as well."""
    scores_per_step: int = measured(1 << 21, "scores", "2026-11-21")
    """Scores per call of tiles: few enough to fit a cache, many enough to amortize the overhead of a call."""
    saved_tile_weights: int = budget(1 << 24, "elements", "2026-11-21")
    """Up to this many weights of tiles, 64 MB, are saved for the gradient instead of being recomputed."""
    scores_per_piece: int = measured(1 << 22, "scores", "2026-11-21")
    """Scores of a position that are computed at a time in visible blocks."""
    flex_block: int = measured(128, "tokens", "2026-11-21")
    """Block size of the compiled kernel."""
    max_compiled_masks: int = budget(64, "masks", "2026-11-21")
    """Masks compiled in one process; a model with growing windows exceeds torch's default limit of 8."""

    lse_block: int = measured(256, "queries", "2026-11-21")
    """Queries per block where scores are written out: the extra memory is this many rows of scores."""
    pairwise_block: int = measured(128, "queries", "2026-11-21")
    """Queries per block where a position acts on each pair."""
    toeplitz_block: int = measured(256, "queries", "2026-11-21")
    """Queries per block; larger ones waste more on hidden keys ahead, smaller ones slow torch's kernel down."""
    band_block: int = measured(64, "queries", "2026-11-21")
    """Queries per block of a diagonal band."""
    span_rounding: int = measured(32, "keys", "2026-11-21")
    """Spans are rounded up to a multiple of this; heads of equal rounded spans share a band."""
    distance_vector_block: int = measured(128, "queries", "2026-11-21")
    """Queries per block where the gradient is not written by hand."""
    distance_vector_queries: int = measured(64, "queries", "2026-11-21")
    """Queries per block: small blocks cost little on a CPU and waste less on hidden keys ahead."""
    scores_per_thread: int = measured(1 << 19, "scores", "2026-11-21")
    """Scores per thread that exist at once, so that they stay in its caches."""
    saved_distance_vector_weights: int = budget(1 << 23, "elements", "2026-11-21")
    """Up to this many weights, 32 MB, are saved for the gradient, which saves a sixth of the time."""
    selective_scan_chunk: int = budget(16, "tokens", "2026-11-26")
    """Tokens whose memories a selective scan holds at once; for gradients those before each chunk are stored."""
    cached_block_elements: int = measured(96 << 10, "elements", "2026-11-26")
    """Elements of a tensor, for each thread of a CPU, that several operations read in turn before the next ones."""
    selective_scan_elements: int = measured(1 << 19, "elements", "2026-11-26")
    """Numbers in the memories of a chunk on a CPU: as many rows are scanned together as have no more."""
    channel_decay_block: int = measured(16, "tokens", "2026-11-21")
    """The shortest chunks of a recurrence with strong decays per channel, whose pairs cost a product per channel."""

    pairs_per_thread: int = measured(1 << 17, "pairs", "2026-11-21")
    """Token pairs per thread and call: as many as fit its caches."""
    chunk_pairs_per_call: int = measured(1 << 18, "pairs", "2026-11-21")
    """Token pairs per call on a CPU: as many as fit its caches."""
    chunk_pairs_per_call_elsewhere: int = budget(1 << 26, "pairs", "2026-11-21")
    """The same on other devices, which need more parallel work."""
    search_products_per_block: int = measured(1 << 22, "products", "2026-11-21")
    """Products of a search that exist at once on a CPU: as many as fit its last-level cache."""
    search_products_per_block_elsewhere: int = budget(1 << 27, "products", "2026-11-21")
    """The same on other devices, which need more parallel work."""
    search_queries_per_block: int = measured(64, "queries", "2026-11-21")
    """Queries per block where the keys are too many for larger blocks."""

    min_chunked_classes: int = measured(8192, "classes", "2026-11-21")
    """From this many classes on, the loss is computed in chunks of tokens: less memory and, on a CPU, less time."""
    tokens_per_loss_chunk: int = measured(512, "tokens", "2026-11-21")
    """Tokens per chunk of the loss on a CPU."""
    loss_logits_elsewhere: int = budget(1 << 29, "logits", "2026-11-27")
    """Logits of the loss that exist at once on other devices: 2 GiB in float32."""
    sinusoid_table_distance: int = budget(1 << 13, "tokens", "2026-11-21")
    """A table of sinusoids ends at this distance; those of larger distances are computed at every call."""
    projected_distance_margin: int = measured(256, "tokens", "2026-11-21")
    """Distances beyond the requested ones that are projected in advance for the next decoding steps."""
    rotary_table_rows: int = budget(1 << 16, "tokens", "2026-11-21")
    """The table of cosines and sines ends at this position; beyond it, they are computed at every call."""
    eviction_range: int = measured(1024, "tokens", "2026-11-21")
    """A mask is evaluated and cached for this many positions at once to find keys that no query will see."""


COSTS = CostModel()
"""The library's costs."""

_in_use: tuple[CostModel, CostsInUse] | None = None


def tuned_costs() -> tuple[CostModel, CostsInUse]:
    """The library's costs with those that `manyformer doctor --tune` has measured on this machine, and their origin.

    The file is read at the first call of a process, not at import: a home folder that cannot be read is no reason to
    refuse all work. Its problem is told once.
    """
    # no functools.cache, whose wrapper a compiler that traces a caller would look through
    global _in_use
    if _in_use is None:
        found = read_tuned_costs(tuple(size for size, _ in COSTS.pair_rates))
        if found.problem:
            warnings.warn(found.problem, stacklevel=2)
        _in_use = replace(COSTS, **found.values), found
    return _in_use
