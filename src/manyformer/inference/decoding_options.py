"""The options of decoding, written once: the keywords of `generate` and the options of the command line."""

from typing import Annotated, Literal, TypedDict

from annotated_types import Ge, Le

StepPath = Literal["auto", "eager", "static", "graph"]
"""How single tokens are decoded: operator by operator, by operators that are the same at every step, or as a graph."""

DrafterName = Literal["ahead", "lookup"]
"""What drafts tokens: the model's own layers that predict further tokens, or what followed the same tokens before."""


class DecodingOptions(TypedDict, total=False):
    """The flat options of decoding with bounds and meanings; None and a missing option mean the same."""

    greedy: Annotated[
        bool | None,
        "Always take the most probable token, as without any option that chooses; False samples.",
    ]
    temperature: Annotated[
        float | None,
        Ge(0),
        "Sample: below 1 favors probable tokens, above 1 improbable ones; 0 always takes the most probable token.",
    ]
    top_k: Annotated[int | None, Ge(1), "Sample among the K most probable tokens."]
    top_p: Annotated[float | None, "Sample among the most probable tokens that sum to this probability."]
    min_p: Annotated[float | None, "Sample among tokens with at least this fraction of the highest probability."]
    repetition_penalty: Annotated[float | None, "Divide the logits of tokens that occurred by this (1.1 to 1.5)."]
    no_repeat_ngram: Annotated[int | None, Ge(1), "No sequence of this many tokens occurs twice."]
    beam: Annotated[int | None, Ge(1), Le(1024), "Beam search of this width instead of sampling; 1 is greedy decoding."]
    length_penalty: Annotated[
        float | None,
        "Length penalty of beam search (Wu et al. 2016): larger values favor longer texts; 0.6 unless given.",
    ]
    best: Annotated[int | None, Ge(1), Le(1024), "Number of hypotheses that beam search returns for each prompt."]
    max_new: Annotated[
        int | None,
        Ge(1),
        Le(1_000_000),
        "At most this many new tokens; 256 (a translation: source + 50), or fewer at the model's max_length.",
    ]
    crop: Annotated[
        bool | None,
        "Leave out the beginning of a prompt with which the new tokens would exceed the model's max_length.",
    ]
    seed: Annotated[int | None, Ge(0), Le(2**63 - 1), "The same seed gives the same text."]
    samples: Annotated[int | None, Ge(0), Le(100_000), "Number of texts that are sampled for each prompt."]
    stop: Annotated[str | tuple[str, ...], "Stop before this text; \\n means a new line. May be given several times."]
    stop_ids: Annotated[tuple[int, ...] | None, "Token ids that end a text; the tokenizer's end token unless given."]
    step_path: Annotated[
        StepPath | None,
        "How tokens are decoded: eager, static (the same operators for each), graph (these as a CUDA graph), auto.",
    ]
    draft: Annotated[
        int | None,
        Ge(1),
        Le(64),
        "Draft this many tokens and verify them in one step, which changes no greedy text and no distribution.",
    ]
    drafter: Annotated[
        DrafterName | None,
        "What drafts: the model's layers that predict tokens ahead, unless given, or a lookup in the text itself.",
    ]
    use_cache: Annotated[bool | None, "Decode with the model's state; if that changes no results unless given."]
