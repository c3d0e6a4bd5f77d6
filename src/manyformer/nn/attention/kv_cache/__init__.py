"""Key/value sources: the sequences that keys and values are projected from, and their caches."""

from manyformer.nn.attention.kv_cache.kv_source import (
    CrossAttentionSource,
    HaltedKV,
    HaltedTokenSource,
    KeysValues,
    KVSource,
    ProjectKV,
    SelfSource,
)
from manyformer.nn.attention.kv_cache.segment_memory import PrefixSource, SegmentMemorySource
from manyformer.nn.attention.kv_cache.window_cache import SpanCacheSource, WindowSource

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
