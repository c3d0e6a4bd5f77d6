"""What people and editors are told of the settings."""

from stand_in_recipes import load, signature_of

from manyformer.config import describe_settings, json_schema
from manyformer.config.setting_names import RUN_SETTINGS


def test_help_shows_the_runs_own_values_as_defaults() -> None:
    run = load("lm", "depth=9", "optim.name=adam", "optim.lr=0.25", "data.length=77")
    rows = {row.key: row for row in describe_settings(run, signature_of("lm"))}
    assert rows["model.depth"] == ("model.depth", "a whole number >= 1", "9", "number of layers")
    assert (rows["model.heads"].default, rows["model.ff_dim"].type) == ("4", "a whole number or null")
    assert rows["model.norm_order"][1:3] == ("one of pre, post, sandwich", "pre")
    assert rows["optim.lr"].default == "0.25"
    assert rows["optim.name"][1:3] == ("one of adamw, adam, adagrad, adadelta, muon, sgd, lion, adafactor", "adam")
    assert "optim.weight_decay" not in rows, "adam has none"
    assert rows["data.length"].default == "77"
    assert (
        rows["data.kind"].type
        == "one of text, pairs, labels, sentence-pairs, questions, trees, images, synthetic, trajectories, "
        "environment, graphs, audio, modalities"
    )
    assert rows["data.valid"].type == "a fraction between 0 and 1, a path or a list of paths"
    assert rows["optim.betas"][1:3] == ("two numbers from 0 up to 1, such as [0.9, 0.98]", "[0.9, 0.98]")
    assert rows["batch.tokens"].type == "a whole number > 0"
    assert rows["loss.label_smoothing"].type == "a number >= 0 and < 1"
    assert rows["limits.steps"].type == "a whole number > 0 or null"
    assert rows["trackers"].type == "a list of one of tensorboard, wandb, mlflow"
    assert rows["activation_checkpointing"][1:3] == (
        "true, false, K for every K-th layer, or a list of layers",
        "false",
    )
    assert rows["out"].default == "runs/lm"


def test_every_row_says_something_and_every_setting_has_a_row() -> None:
    rows = describe_settings()
    assert all(row.doc and row.type and row.default for row in rows)
    assert {row.key.partition(".")[0] for row in rows} | {"model"} == set(RUN_SETTINGS)
    assert next(row for row in rows if row.key == "recipe").default == "required"
    assert all("\n" not in row.doc for row in rows)


def test_every_default_can_be_typed_back() -> None:
    run = load("lm", "data.path=x y", "model.ff_dim=3")
    words = [f"{row.key}={row.default}" for row in describe_settings(run, signature_of("lm"))]
    given = load("lm", *words)
    assert given.model_copy(update={"model": {}}) == run.model_copy(update={"model": {}})
    assert given.model["ff_dim"] == 3


def test_the_schema_knows_sections_members_and_help() -> None:
    schema = json_schema()
    assert schema["properties"]["extends"]["type"] == "string"
    assert schema["additionalProperties"] is False
    assert {"required": ["recipe"]} in schema["anyOf"]
    assert "required" not in schema
    members = schema["properties"]["optim"]["oneOf"]
    assert [member["$ref"] for member in members] == [
        f"#/$defs/{name}Config" for name in ("AdamW", "Adam", "Adagrad", "Adadelta", "Muon", "SGD", "Lion", "Adafactor")
    ]
    assert schema["properties"]["optim"]["discriminator"]["propertyName"] == "name"
    assert schema["$defs"]["TextData"]["properties"]["length"]["description"] == "Tokens in a row."
