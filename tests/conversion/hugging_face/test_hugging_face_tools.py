"""Tools made for models of `transformers` work on ours: PEFT's LoRA, the Trainer, the evaluation harness."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import manyformer as mf
import manyformer.conversion.hugging_face.auto_model as auto_model
from manyformer.conversion.hugging_face import export_model
from manyformer.inference.evaluate import evaluate

pytestmark = pytest.mark.oracle

LINEAR_LAYERS = ["q_proj", "kv_proj", "out_proj", "up", "down"]
QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def loaded_model(folder: Path) -> Any:
    """A language model that no class of `transformers` equals, from the folder that it was exported to."""
    if not folder.exists():
        export_model(mf.build("linear-transformer", vocab=30, dim=16, depth=2, heads=2).eval(), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": row} for row in torch.randint(5, 30, (8, 12)).tolist()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_lora_trains_and_merges(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA of PEFT needs the package peft")
    model, tokens = loaded_model(tmp_path / "model"), torch.randint(5, 30, (2, 12))
    expected = model(tokens).logits.detach()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR_LAYERS, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=0, atol=0)
    settings = transformers.TrainingArguments(str(tmp_path / "out"), max_steps=4, learning_rate=1e-2, **QUIET)
    transformers.Trainer(adapted, settings, train_dataset=rows()).train()
    trained = adapted.eval()(tokens).logits.detach()
    assert (trained - expected).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded_model(tmp_path / "model"), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(tokens).logits, trained, rtol=0, atol=0)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, trained)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded_model(tmp_path / "merged")(tokens).logits, merged(tokens).logits, rtol=0, atol=0)
    assert merged.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 15)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("recipe", ["linear-transformer", "transformer"])
def test_the_trainer_takes_steps(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs the package accelerate")
    model = mf.build(recipe, vocab=30, dim=16, depth=1, heads=2)
    model.save(tmp_path / "model")
    kind = transformers.AutoModelForSeq2SeqLM if recipe == "transformer" else transformers.AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(tmp_path / "model")
    assert isinstance(loaded, auto_model.ManyformerForSeq2SeqLM | auto_model.ManyformerForCausalLM)
    settings = transformers.TrainingArguments(str(tmp_path / "out"), max_steps=12, learning_rate=1e-2, **QUIET)
    trainer = transformers.Trainer(loaded, settings, train_dataset=rows())
    before = trainer.evaluate(rows())["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows())["eval_loss"] < before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_harness_scores_as_evaluate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text with its end token, which `evaluate` scores too."""
    pytest.importorskip("lm_eval", reason="the evaluation harness is large: pip install lm_eval")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from tokenizers import processors

    words = "the cat sat on the mat and naïve dogs looked on\n"
    (tmp_path / "text.txt").write_text(words * 200)
    (tmp_path / "held.txt").write_text(words)
    run = tmp_path / "run"
    settings = ["data.tokenizer=byte", f"data.path={tmp_path / 'text.txt'}", "data.length=64", "model.dim=16"]
    mf.train("linear-transformer", [*settings, "model.depth=1", "model.heads=2", "limits.steps=5", f"out={run}"])
    scores = {score.name: score.value for score in evaluate(run, data=str(tmp_path / "held.txt")).scores}
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"text": words}) + "\n")
    task = {
        "task": "held",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "test.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / "held.yaml").write_text(json.dumps(task))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    model = HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(run),
        tokenizer=tokenizer,
        backend="causal",
        max_length=64,
        device="cpu",
        prefix_token_id=tokenizer.bos_token_id,
        add_bos_token=True,
    )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(model=model, tasks=["held"], task_manager=manager, bootstrap_iters=0)["results"]["held"]
    difference = (results["bits_per_byte,none"] - scores["bits per byte"]) * math.log(2) * len(words.encode())
    assert abs(difference) / (len(words.encode()) + 1) < 1e-4
