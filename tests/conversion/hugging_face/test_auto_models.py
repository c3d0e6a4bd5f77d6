"""Models behind the `AutoModel` classes of `transformers`: reloaded, generating, and as their authors load them."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import manyformer as mf
import manyformer.conversion.hugging_face.auto_model as auto_model
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model
from manyformer.conversion.hugging_face.auto_model.pretrained_classes import DecodingCache
from manyformer.conversion.hugging_face.exported_config import AUTO_CLASSES, config_fields, generation_fields
from manyformer.conversion.hugging_face.model_import import save_imported
from manyformer.data.tokenizers.native_tokenizers import ByteTokenizer
from manyformer.models import Model, ModelOutput
from manyformer.recipes import all_recipes, get_recipe
from manyformer.recipes.parts.registry import task_of

QUICK = {"transformer-lm", "linear-transformer", "transformer", "roformer", "structural", "vit", "da-transformer"}
"""One recipe of each kind, and one with tables that no file holds; the others are slow together."""


def recipes_of(*suffixes: str) -> list[Any]:
    """The recipes that classes with these names stand for."""
    names = []
    for name, recipe in all_recipes().items():
        task = recipe.card.task
        kind = AUTO_CLASSES.get(task.model)
        is_text = kind is None or kind.suffix != "Seq2SeqLM" or task.generates == "answer"
        if kind is not None and is_text and (not suffixes or kind.suffix in suffixes):
            names.append(pytest.param(name, marks=() if name in QUICK else pytest.mark.slow))
    return names


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def tiny(name: str) -> Model:
    return build_tiny(name, {}, seed=0).eval()


def wrapped(model: Model) -> Any:
    """The model behind its class of `transformers`, also where a native class equals it."""
    config = auto_model.ManyformerConfig(**config_fields(model))
    wrapper: Any = getattr(auto_model, AUTO_CLASSES[type(model)].architecture).wrap(model, config)
    if wrapper.can_generate():
        wrapper.generation_config = transformers.GenerationConfig(**generation_fields(model) or {})
    return wrapper


def example_of(model: Model) -> tuple[dict[str, Tensor], ModelOutput]:
    """The inputs of the class of `transformers` with labels, and the output that they must give."""
    task, suffix = task_of(model), AUTO_CLASSES[type(model)].suffix
    tokens = torch.randint(5, task.token_ids(model), (2, task.fixed_length(model) or 24))
    inputs = task.example(model, tokens)
    arguments = task.arguments(model, inputs)
    with torch.no_grad():
        expected = task.call(model, inputs)
    labels = torch.randint(expected.logits.shape[-1], expected.logits.shape[:-1])
    if suffix == "ImageClassification":
        pixels = arguments[0].movedim(-1, 1)
        return {
            "pixel_values": pixels if pixels.is_floating_point() else pixels / 127.5 - 1,
            "labels": labels,
        }, expected
    if suffix == "Seq2SeqLM":
        return {"input_ids": arguments[0], "decoder_input_ids": arguments[1], "labels": labels}, expected
    extra = {"trees": arguments[2]} if suffix == "TokenClassification" else {}
    return {"input_ids": tokens, "labels": labels, **extra}, expected


@pytest.mark.parametrize("name", recipes_of())
def test_the_same_logits_after_a_reload(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    inputs, expected = example_of(model)
    wrapper = wrapped(model)
    wrapper.save_pretrained(tmp_path)
    kind = AUTO_CLASSES[type(model)]
    back, loading = getattr(transformers, kind.auto_class).from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] | loading["unexpected_keys"]
    with torch.no_grad():
        output, reloaded = wrapper(**inputs), back(**inputs)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reloaded.logits, output.logits, rtol=0, atol=0)
    mean = torch.nn.functional.cross_entropy(expected.logits.flatten(0, -2), inputs["labels"].flatten())
    if kind.suffix != "CausalLM":
        torch.testing.assert_close(output.loss, mean + expected.loss)


@pytest.mark.parametrize("name", recipes_of("CausalLM", "Seq2SeqLM"))
def test_generate(name: str) -> None:
    """Greedy and beam texts from a state equal those without one and those of this library, also with padding."""
    model = tiny(name)
    wrapper, is_translation = wrapped(model), AUTO_CLASSES[type(model)].suffix == "Seq2SeqLM"
    tokens, mask = torch.randint(5, task_of(model).token_ids(model), (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    if not is_translation:
        mask = mask.flip(1)
    start = 1 if is_translation else 6

    def generate(**options: Any) -> list[list[int]]:
        rows = wrapper.generate(tokens, attention_mask=mask, max_new_tokens=8, eos_token_id=None, **options)
        written: list[list[int]] = rows[:, start:].tolist()
        return written

    greedy = generate(do_sample=False, use_cache=wrapper.generation_config.use_cache)
    assert generate(do_sample=False, use_cache=False) == greedy
    prompts = [row[is_token.bool()] for row, is_token in zip(tokens, mask, strict=True)]
    incremental = "incremental_decoding" in get_recipe(name).card.promises
    assert mf.generate(model, prompts, max_new=8, stop_ids=(), use_cache=incremental).tokens == greedy
    if incremental:
        assert generate(do_sample=False, num_beams=3) == generate(do_sample=False, num_beams=3, use_cache=False)
    torch.manual_seed(1)
    samples = generate(do_sample=True, num_return_sequences=3, top_k=0)
    assert len(samples) == 6
    assert max(max(row) for row in samples) < model.vocab


def test_generate_stops_at_the_end_token_of_its_settings(tmp_path: Path) -> None:
    model = mf.build("linear-transformer", vocab=261, dim=8, depth=1, heads=2)
    model.tokenizer = ByteTokenizer()
    assert export_model(model, tmp_path / "out").architecture == "ManyformerForCausalLM"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.suppress_tokens == [0, 1]
    with torch.no_grad():
        loaded.model.head.weight[2] = 0
        loaded.model.embed.token.weight.zero_()
        loaded.model.embed.token.weight[2] = 0
    text = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = loaded.generate(**text("def ", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    # all logits are equal: the first token that may be written ends the text
    assert rows[0, 4:].tolist() == [2]
    assert loaded.get_input_embeddings().weight.shape == (261, 8)


@pytest.mark.parametrize("name", ["transformer-lm", "linear-transformer", "transformer"])
def test_runs_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    model = mf.build(name, vocab=261, dim=8, depth=1, heads=2).eval()
    model.tokenizer = ByteTokenizer()
    save_imported(model, tmp_path / "run" / "model")
    kind = AUTO_CLASSES[type(model)]
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        loaded = getattr(transformers, kind.auto_class).from_pretrained(folder)
        assert type(loaded) is getattr(auto_model, kind.architecture)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        ids = tokenizer("a <eos>", return_tensors="pt").input_ids
        assert ids[0].tolist() == [*model.tokenizer.encode("a <eos>"), *[2] * (name == "transformer")]
        options = {"labels": ids} if name == "transformer" else {}
        expected = model(ids, torch.tensor([[1, *ids[0, :-1].tolist()]])) if options else model(ids)
        torch.testing.assert_close(loaded(ids, **options).logits, expected.logits, rtol=0, atol=0)
    narrow = getattr(transformers, kind.auto_class).from_pretrained(tmp_path / "run", dtype=torch.bfloat16)
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        getattr(transformers, kind.auto_class).from_pretrained(tmp_path / "run")


def test_a_new_head_is_drawn_and_the_rest_is_kept(tmp_path: Path) -> None:
    model = mf.build("roformer", vocab=30, dim=16, depth=1, heads=2, head="classification", classes=3)
    model.labels = ("no", "yes", "perhaps")
    export_model(model, tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "no", 1: "yes", 2: "perhaps"}
    config.manyformer["keywords"]["classes"] = 5
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", config=config, ignore_mismatched_sizes=True
    )
    assert loaded(torch.tensor([[5, 6]])).logits.shape == (1, 5)
    assert loaded.model.head.weight.abs().max() < 10
    torch.testing.assert_close(loaded.model.embed.token.weight, model.embed.token.weight, rtol=0, atol=0)


def test_what_is_refused() -> None:
    model = wrapped(tiny("linear-transformer"))
    tokens = torch.tensor([[5, 6]])
    for options, sentence in (
        ({"output_attentions": True}, "output_attentions is True, which models of manyformer do not have"),
        ({"inputs_embeds": torch.zeros(1, 2, 16)}, "inputs_embeds is tensor"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, "attention_mask has 4 axes"),
        ({"past_key_values": transformers.DynamicCache()}, "the cache is a DynamicCache"),
        ({"cache": transformers.DynamicCache()}, "the cache is a DynamicCache"),
        ({"cache": DecodingCache(None), "past_key_values": DecodingCache(None)}, "two names of one argument"),
    ):
        with pytest.raises(UserError, match=sentence):
            model(tokens, **options)
    with pytest.raises(UserError, match="the vocabulary is a keyword of the recipe"):
        model.resize_token_embeddings(99)
    for name in ("cache", "past_key_values"):
        output = model(tokens, use_cache=True)
        cache = output["cache" if "cache" in output else "past_key_values"]
        assert (type(cache), cache.get_seq_length()) == (DecodingCache, 2)
        stepped = model(tokens, **{name: cache}).logits
        torch.testing.assert_close(stepped, model(torch.cat([tokens, tokens], 1)).logits[:, 2:])
        assert cache.get_seq_length() == 4
    with pytest.raises(NotImplementedError, match="cannot be shortened"):
        cache.crop(1)
    with pytest.raises(UserError, match="none of ManyformerForMaskedLM; AutoModelForCausalLM loads it"):
        auto_model.ManyformerForMaskedLM(model.config)
    with pytest.raises(UserError, match="the config names no recipe"):
        auto_model.ManyformerForCausalLM(auto_model.ManyformerConfig())
    with pytest.raises(UserError, match="captioner is for captioning of images"):
        config_fields(tiny("captioner"))


def test_the_loader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(tiny("linear-transformer"), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "manyformer.conversion.hugging_face.auto_model", None)
    spec = importlib.util.spec_from_file_location("loader", tmp_path / "out" / "modeling_manyformer.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"needs the package manyformer: pip install 'manyformer\[hf\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hidden", "sentence"),
    [
        ("linear-transformer", False, "ManyformerForCausalLM"),
        ("linear-transformer", True, "this model needs the package manyformer"),
        ("transformer-lm", True, "GPT2LMHeadModel"),
    ],
)
def test_a_process_that_imports_nothing_of_ours(name: str, hidden: bool, sentence: str, tmp_path: Path) -> None:
    export_model(tiny(name), tmp_path / "out")
    hide = "sys.modules['manyformer'] = None" if hidden else ""
    code = f"""
import sys
{hide}
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True)).__name__)
"""
    environment = {"HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert sentence in ended.stdout + ended.stderr.splitlines()[-1]
