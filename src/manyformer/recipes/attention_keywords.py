"""Keywords of every recipe that chooses a number of heads: dropout of weights, removed heads, shared dimensions."""

from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from annotated_types import Ge, Lt

from manyformer.attention.attention import set_attention_dropout
from manyformer.attention.head_gates import parse_heads, remove_heads
from manyformer.mixers.collaborative_attention import share_query_key_dims
from manyformer.recipes.keywords import Default, PositiveSize, SharedKeywords

REMOVED_HEADS = "removed_heads"
SHARED_QK_DIM = "shared_qk_dim"


class AttentionOptions(TypedDict, total=False):
    """What changes all attention of a model."""

    attention_dropout: Annotated[
        float, Ge(0), Lt(1), "probability that a weight of softmax attention is dropped in training", Default(0.0)
    ]
    removed_heads: Annotated[
        str | None,
        "attention heads to build without, as manyformer prune writes them: layer:number,number layer:number",
        Default(None),
    ]
    shared_qk_dim: Annotated[
        PositiveSize | None,
        "number of query and key dimensions that all heads of a layer share (collaborative attention); null means that "
        "each head has its own",
        Default(None),
    ]


def _read(options: dict[str, Any]) -> Callable[[Any], Any]:
    removed = parse_heads(options.get(REMOVED_HEADS) or "")

    def change(model: Any) -> Any:
        shared_qk_dim = options.get(SHARED_QK_DIM)
        if shared_qk_dim is not None:
            share_query_key_dims(model, shared_qk_dim)
        remove_heads(model, removed)
        set_attention_dropout(model, options.get("attention_dropout", 0.0))
        return model

    return change


ATTENTION_KEYWORDS = SharedKeywords(
    AttentionOptions, lambda signature, task: bool({"heads", "base_keywords"} & signature.parameters.keys()), _read
)
