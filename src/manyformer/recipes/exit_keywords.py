"""Keywords that recipes with early exit share."""

from typing import Annotated, Any

from manyformer.models.exit_loss import ExitLossWeights
from manyformer.models.with_early_exit import ClassifierSharing, ExitRuleName, ExitThresholds, ExitTraining, OracleName
from manyformer.recipes.keywords import PositiveInt

ThresholdKeyword = Annotated[
    ExitThresholds, "confidence at which a token exits, above 1 never; a list has one value for each layer but the last"
]
ThresholdDecayKeyword = Annotated[
    float | None, "rate at which the threshold decays along the horizon; null means constant"
]
HorizonKeyword = Annotated[PositiveInt, "longest output, along which a decaying threshold decreases"]
ClassifierSharingKeyword = Annotated[
    ClassifierSharing, "one output classifier shared by all layers, or one for each layer"
]
ExitTrainingKeyword = Annotated[
    ExitTraining, "every layer is trained on every token (aligned), or on randomly sampled exits (mixed)"
]
MixedSamplesKeyword = Annotated[PositiveInt, "number of random exit sequences of a mixed training, for each batch"]
OracleKeyword = Annotated[
    OracleName, "how target exits are chosen: by the likelihood of the target, or by whether the prediction is correct"
]
SmoothingKeyword = Annotated[
    float, "width of the kernel that smooths an oracle's scores over neighbouring tokens; 0 means none"
]
LayerPenaltyKeyword = Annotated[float, "penalty of an oracle for each layer"]
ExitWeightKeyword = Annotated[float, "weight in the loss of exit prediction"]
BaseRecipeKeyword = Annotated[str, "recipe of the model that early exit is added to"]
BaseKeywordsKeyword = Annotated[
    dict[str, Any] | None, "keywords of the base recipe, except those that the data may decide"
]
RuleKeyword = Annotated[
    ExitRuleName, "exit rule: a measure of confidence, or a small classifier that predicts the exit layer"
]
LayerWeightsKeyword = Annotated[
    ExitLossWeights, "equal weights of all layers in the loss, or weights that rise with the layer"
]
