"""Keywords that recipes with early exit share."""

from typing import Annotated, Any, TypedDict

from manyformer.models.exit_loss import ExitLossWeights
from manyformer.models.with_early_exit import ClassifierSharing, ExitRuleName, ExitThresholds, ExitTraining, OracleName
from manyformer.recipes.keywords import Default, PositiveSize

BaseRecipeKeyword = Annotated[str, "recipe of the model that early exit is added to"]
BaseKeywordsKeyword = Annotated[
    dict[str, Any] | None, "keywords of the base recipe, except those that the data may decide"
]
ThresholdKeyword = Annotated[
    ExitThresholds, "confidence at which a token exits, above 1 never; a list has one value for each layer but the last"
]
ThresholdDecayKeyword = Annotated[
    float | None, "rate at which the threshold decays along the horizon; null means constant"
]
HorizonKeyword = Annotated[PositiveSize, "longest output, along which a decaying threshold decreases"]
ClassifierSharingKeyword = Annotated[
    ClassifierSharing, "one output classifier shared by all layers, or one for each layer"
]


class ExitLearningOptions(TypedDict, total=False):
    """How the classifiers of all layers and the exits are trained."""

    exit_training: Annotated[
        ExitTraining,
        "every layer is trained on every token (aligned), or on randomly sampled exits (mixed)",
        Default("aligned"),
    ]
    mixed_samples: Annotated[
        PositiveSize, "number of random exit sequences of a mixed training, for each batch", Default(1)
    ]
    oracle: Annotated[
        OracleName,
        "how target exits are chosen: by the likelihood of the target, or by whether the prediction is correct",
        Default("correctness"),
    ]
    smoothing: Annotated[
        float,
        "width of the kernel that smooths an oracle's scores over neighbouring tokens; 0 means none",
        Default(1.0),
    ]
    layer_penalty: Annotated[float, "penalty of an oracle for each layer", Default(0.01)]
    exit_weight: Annotated[float, "weight in the loss of exit prediction", Default(0.1)]


class ExitRuleOptions(TypedDict, total=False):
    """When a token exits."""

    rule: Annotated[
        ExitRuleName,
        "exit rule: a measure of confidence, or a small classifier that predicts the exit layer",
        Default("softmax"),
    ]
    threshold: Annotated[ThresholdKeyword, Default(None)]
    threshold_decay: Annotated[ThresholdDecayKeyword, Default(None)]
    horizon: Annotated[HorizonKeyword, Default(100)]
    classifier_sharing: Annotated[ClassifierSharingKeyword, Default("shared")]
    layer_weights: Annotated[
        ExitLossWeights,
        "equal weights of all layers in the loss, or weights that rise with the layer",
        Default("rising"),
    ]


class EarlyExitOptions(ExitRuleOptions, ExitLearningOptions):
    """All settings of early exit; `manyformer.early_exit` describes them."""
