"""Models of this library behind the `AutoModel` classes of `transformers`, which importing this package registers."""

import transformers
from transformers import AutoConfig, AutoTokenizer

from manyformer.conversion.hugging_face.auto_model.pretrained_classes import (
    ManyformerForCausalLM,
    ManyformerForImageClassification,
    ManyformerForMaskedLM,
    ManyformerForQuestionAnswering,
    ManyformerForSeq2SeqLM,
    ManyformerForSequenceClassification,
    ManyformerForTokenClassification,
)
from manyformer.conversion.hugging_face.auto_model.pretrained_model import (
    ManyformerConfig,
    ManyformerTokenizer,
    let_auto_config_read_runs,
)
from manyformer.conversion.hugging_face.exported_config import AUTO_CLASSES
from manyformer.conversion.hugging_face.hf_folder import MODEL_TYPE

__all__ = [
    "ManyformerConfig",
    "ManyformerForCausalLM",
    "ManyformerForImageClassification",
    "ManyformerForMaskedLM",
    "ManyformerForQuestionAnswering",
    "ManyformerForSeq2SeqLM",
    "ManyformerForSequenceClassification",
    "ManyformerForTokenClassification",
    "ManyformerTokenizer",
]

AutoConfig.register(MODEL_TYPE, ManyformerConfig, exist_ok=True)
AutoTokenizer.register(ManyformerConfig, ManyformerTokenizer, exist_ok=True)
let_auto_config_read_runs()
for kind in AUTO_CLASSES.values():
    getattr(transformers, kind.auto_class).register(ManyformerConfig, globals()[kind.architecture], exist_ok=True)
