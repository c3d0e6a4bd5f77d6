"""The families of foreign models that have an equal recipe."""

from manyformer.interop.families.bart import BART
from manyformer.interop.families.bert import BERT
from manyformer.interop.families.bigbird import BIGBIRD
from manyformer.interop.families.decision_transformer_family import DECISION_TRANSFORMER
from manyformer.interop.families.deepseek import DEEPSEEK
from manyformer.interop.families.diffllama import DIFFLLAMA
from manyformer.interop.families.distilbert import DISTILBERT
from manyformer.interop.families.gpt2 import GPT2
from manyformer.interop.families.gpt_oss import GPT_OSS
from manyformer.interop.families.llama import LLAMA
from manyformer.interop.families.longformer import LONGFORMER
from manyformer.interop.families.mamba import MAMBA
from manyformer.interop.families.mixtral import MIXTRAL
from manyformer.interop.families.perceiver_family import PERCEIVER
from manyformer.interop.families.phi3 import PHI3
from manyformer.interop.families.qwen3_next import QWEN3_NEXT
from manyformer.interop.families.reformer import REFORMER
from manyformer.interop.families.roberta import ROBERTA
from manyformer.interop.families.t5 import T5
from manyformer.interop.families.vit import DEIT, VIT
from manyformer.interop.families.xlnet import XLNET
from manyformer.interop.model_family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (
    GPT2,
    LLAMA,
    BERT,
    ROBERTA,
    DISTILBERT,
    LONGFORMER,
    BIGBIRD,
    XLNET,
    VIT,
    DEIT,
    T5,
    BART,
    DECISION_TRANSFORMER,
    REFORMER,
    MIXTRAL,
    MAMBA,
    DEEPSEEK,
    GPT_OSS,
    DIFFLLAMA,
    QWEN3_NEXT,
    PERCEIVER,
    PHI3,
)

FAMILY_OF_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
"""The family of each `model_type` of a config."""

__all__ = ["FAMILIES", "FAMILY_OF_TYPE"]
