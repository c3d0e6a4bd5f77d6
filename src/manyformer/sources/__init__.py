"""Key/value sources: the sequences that keys and values are projected from, and their caches."""

from manyformer.sources.cross_attention import CrossAttentionSource
from manyformer.sources.halted_tokens import HaltedKV, HaltedTokenSource
from manyformer.sources.kv_source import KeysValues, KVSource, ProjectKV
from manyformer.sources.prefix import PrefixSource
from manyformer.sources.segment_memory import SegmentMemorySource
from manyformer.sources.self_attention import SelfSource
from manyformer.sources.span_cache import SpanCacheSource
from manyformer.sources.window_cache import WindowSource

__all__ = [
    "CrossAttentionSource",
    "HaltedKV",
    "HaltedTokenSource",
    "KVSource",
    "KeysValues",
    "PrefixSource",
    "ProjectKV",
    "SegmentMemorySource",
    "SelfSource",
    "SpanCacheSource",
    "WindowSource",
]
