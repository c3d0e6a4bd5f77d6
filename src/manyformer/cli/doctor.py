"""`manyformer doctor`: check the installation and this machine: what was found, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import FIND, command
from manyformer.cli.console import Output, PageTable
from manyformer.cli.options import complete_runs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from manyformer.models import Model


@command(
    FIND,
    "manyformer doctor",
    "manyformer doctor --recipes",
    "manyformer doctor runs/lm-stdlib",
    "manyformer doctor --json",
)
def doctor(
    folder: Annotated[
        str | None,
        Argument(
            metavar="[FOLDER]",
            help="A run, a saved model or a datastore to verify.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    tune: Annotated[
        bool, Option("--tune", hidden=True, help="Gone: the library uses the same costs on every machine.")
    ] = False,
    recipes: Annotated[
        bool, Option("--recipes", help="Train and decode with every recipe, tiny, on this machine's GPU or CPU.")
    ] = False,
) -> Output:
    """Check this machine, or verify the files of a folder.

    Of the machine: Python, torch, device, threads, extras, attention kernels, disk, default data; with `--recipes` also
    which recipes need an operator that torch lacks on its device, in half a minute. Of a run, a saved
    model or a datastore: the size and SHA-256 of every file, also of those that were verified before. Ends with exit
    code 1 if something that the core needs does not work, or if a file is damaged.
    """

    if tune:
        raise UserError(
            "--tune is gone: the costs that it wrote to the home folder changed the last digits of results, and no run "
            "recorded them; ~/.cache/manyformer/costs.json is not read any more, and can be removed"
        )
    if recipes and folder is not None:
        raise UserError("--recipes tries this machine; leave the folder out")
    if folder is None:
        findings = examine()
    else:
        findings = verify_folder(Path(folder))
    if recipes:
        from manyformer.nn.runtime.devices import best_device
        from manyformer.recipes import RECIPES

        findings += try_recipes(best_device(), sorted(RECIPES))
    broken = sum(finding.state == "broken" for finding in findings)
    table = PageTable(("subject", "", "result"), findings)
    verdict = "All checks passed."
    if broken:
        verdict = f"{broken} broken, see above."
    return Output(findings, [table, "", verdict], ok=not broken)


OLDEST_TORCH = (2, 10)
NEWEST_TESTED_TORCH = (2, 15)
"""The releases between which the tests have passed: `benchmarks/check_versions.py`."""

CheckStatus = Literal["ok", "absent", "broken"]

TRIED_ROWS = 2
TRIED_TOKENS = 32
TRIED_PROMPTS = ([1, 2, 3], [4, 5])
TRIED_NEW_TOKENS = 3
"""The sizes of a training step, and what is decoded, when a recipe is tried on a device."""

EXTRAS = (
    ("translate", "sacrebleu", "BLEU, chrF and TER"),
    ("translate", "babel", "generated dates and numbers in many languages"),
    ("hf", "transformers", "tokenizers and models of Hugging Face"),
    ("data", "datasets", "Hugging Face data sets by name"),
    ("data", "conllu", "treebanks in CoNLL-U"),
    ("track", "tensorboard", "TensorBoard logs"),
    ("wandb", "wandb", "runs of Weights & Biases"),
    ("mlflow", "mlflow", "runs of MLflow"),
    ("decompose", "tensorly", "shared dimensions for trained heads"),
    ("knn", "faiss", "indexes over large datastores"),
    ("rl", "torchrl", "advantages of policies"),
    ("rl", "gymnasium", "environments"),
    ("rl", "minari", "recorded episodes by name"),
    ("ray", "ray", "training on clusters of Ray"),
)
"""Each extra with a module that shows whether it is installed, and its purpose."""


class DoctorFinding(NamedTuple):
    """The result of one check; `absent` is not an error but limits what can be done."""

    subject: str
    state: CheckStatus
    result: str


def examine() -> list[DoctorFinding]:
    """Run all checks; an exception in one becomes a finding."""
    checks = (_python, _torch, _device, _attention, _extras, _disk, _corpus)
    return [finding for check in checks for finding in _run_check(check)]


def verify_folder(folder: Path) -> list[DoctorFinding]:
    """Verify every folder with a manifest in `folder`. Raises UserError if there is none."""
    from manyformer.base.files.verified_folder import MANIFEST, VerifiedFolder

    manifests = sorted(folder.rglob(MANIFEST))
    if not manifests:
        raise UserError(f"{folder} has no files to verify: no {MANIFEST} is in it")
    findings = []
    for manifest in manifests:
        state: CheckStatus = "ok"
        try:
            files = VerifiedFolder.open(manifest.parent)
            # also of files whose sums were found right before: bits may rot
            files.verify(recompute=True)
            total = sum(size for size, _ in files.sums.values())
            result = f"{len(files.sums)} files, {total / 1e6:,.1f} MB"
        except UserError as damage:
            state = "broken"
            result = str(damage)
        findings.append(DoctorFinding(str(manifest.parent), state, result))
    return findings


def _run_check(check: Callable[[], Iterator[DoctorFinding]]) -> list[DoctorFinding]:
    try:
        return list(check())
    except Exception as error:
        # whatever is wrong with an installation must not keep the other checks from running
        return [DoctorFinding(check.__name__.strip("_"), "broken", f"{type(error).__name__}: {error}")]


def _python() -> Iterator[DoctorFinding]:
    from manyformer.base import VERSION

    yield DoctorFinding("manyformer", "ok", f"{VERSION} in {Path(__file__).parents[1]}")
    state: CheckStatus = "ok" if sys.version_info >= (3, 11) else "broken"
    yield DoctorFinding("Python", state, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _torch() -> Iterator[DoctorFinding]:
    import torch

    release = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if release < OLDEST_TORCH:
        yield DoctorFinding("torch", "broken", f"{torch.__version__}; {_release(OLDEST_TORCH)} or newer is needed")
    elif release > NEWEST_TESTED_TORCH:
        tested = f"up to {_release(NEWEST_TESTED_TORCH)}"
        yield DoctorFinding("torch", "ok", f"{torch.__version__}, not tested with this version, but {tested}")
    else:
        yield DoctorFinding("torch", "ok", torch.__version__)
    # those that this process may use, which a container or a scheduler limits
    if hasattr(os, "sched_getaffinity"):
        cores: int | None = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    yield DoctorFinding("threads", "ok", f"{torch.get_num_threads()} on {cores} cores (OMP_NUM_THREADS sets them)")


def _release(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _device() -> Iterator[DoctorFinding]:
    import torch

    from manyformer.nn.runtime.devices import KINDS

    gpus = [kind for kind in KINDS.values() if not kind.is_host and kind.is_available()]
    if not gpus:
        yield DoctorFinding("GPU", "absent", "none that torch can use; all runs on the CPU")
    for kind in gpus:
        for number in range(kind.how_many()):
            device = torch.device(kind.type, number)
            facts = [f"{kind.type}: {kind.describe(device)}"]
            if (memory := kind.memory(device)) is not None:
                facts.append(f"{memory / 2**30:.0f} GiB")
            facts.append("has bfloat16" if kind.has_bfloat16() else "no bfloat16")
            if not kind.has_float64:
                facts.append("no float64, which is computed on the CPU")
            yield DoctorFinding("GPU", "ok", ", ".join(facts))
    if any(not kind.is_complete for kind in gpus):
        remedy = "`manyformer doctor --recipes` names what recipes lack"
        yield DoctorFinding("operators", "ok", f"torch does not have all of them on this device; {remedy}")


def _attention() -> Iterator[DoctorFinding]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    from manyformer.nn.runtime.devices import best_device

    device = best_device()
    q, k, v = torch.randn(3, 1, 2, 8, 16, device=device).unbind()
    # 4 is the square root of the 16 channels of a head
    expected = (q @ k.mT / 4).softmax(-1) @ v
    yield _compare_outputs("SDPA", scaled_dot_product_attention(q, k, v), expected)
    with warnings.catch_warnings():
        # without compilation it is torch's reference implementation, and warns that it is slow
        warnings.simplefilter("ignore")
        yield _compare_outputs("FlexAttention", flex_attention(q, k, v), expected)


def _compare_outputs(subject: str, output: object, expected: "Tensor") -> DoctorFinding:
    assert isinstance(output, type(expected))
    difference = float((output - expected).abs().max())
    # far above rounding in any precision, far below a wrong result
    if difference > 1e-2:
        return DoctorFinding(subject, "broken", f"differs from softmax(q k') v by {difference:.0e}")
    return DoctorFinding(subject, "ok", f"agrees with softmax(q k') v to {difference:.0e}")


def _extras() -> Iterator[DoctorFinding]:
    # reads the metadata of every installed package
    distributions = importlib.metadata.packages_distributions()
    for extra, module, purpose in EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield DoctorFinding(f"extra {extra}", "absent", f"{purpose}: pip install 'manyformer[{extra}]'")
        else:
            # a distribution may have another name than its module
            (name, *_) = distributions.get(module, [module])
            yield DoctorFinding(f"extra {extra}", "ok", f"{module} {importlib.metadata.version(name)}: {purpose}")


def _disk() -> Iterator[DoctorFinding]:
    free = shutil.disk_usage(Path.cwd()).free
    writable = os.access(Path.cwd(), os.W_OK)
    state: CheckStatus = "ok" if writable and free > 2**30 else "broken"
    note = ", but this folder cannot be written to"
    if writable:
        note = ""
    yield DoctorFinding("disk", state, f"{free / 2**30:.1f} GiB free in {Path.cwd()}{note}")


def _corpus() -> Iterator[DoctorFinding]:
    from manyformer.base.errors import UserError
    from manyformer.data.text.text_sources import stdlib_files

    try:
        source_files = stdlib_files()
    except UserError as error:
        yield DoctorFinding("data stdlib", "absent", str(error))
        return
    total = sum(file.stat().st_size for file in source_files)
    yield DoctorFinding("data stdlib", "ok", f"{len(source_files)} files of Python's own library, {total / 1e6:.1f} MB")


def try_recipes(device: "torch.device", names: Sequence[str]) -> Iterator[DoctorFinding]:
    """Try these recipes with tiny sizes; yields a finding for each that does not work, and one for the others."""
    from manyformer.nn.runtime.devices import device_kind

    working = 0
    title = device_kind(device).describe(device)
    for name in names:
        finding = try_recipe(name, device)
        if finding is None:
            working += 1
        else:
            yield finding
    yield DoctorFinding("recipes", "ok", f"{working} of {len(names)} train and decode on {device.type} ({title})")


def try_recipe(name: str, device: "torch.device") -> DoctorFinding | None:
    """What is wrong with a recipe on a device, in a training step and in decoding; None if it works."""
    from manyformer.analysis.own_models import build_tiny
    from manyformer.inference.generate import generate
    from manyformer.nn.runtime.devices import missing_need
    from manyformer.recipes.parts.registry import task_of

    try:
        model: Any = build_tiny(name, {}, 0).to(device)
        _train_step(model)
        if task_of(model).generates in ("continuation", "answer"):
            # two prompts of different lengths, so that padding is decoded, too
            generate(model, TRIED_PROMPTS, max_new=TRIED_NEW_TOKENS, stop_ids=())
    except Exception as error:
        missing = missing_need(error)
        if missing is None:
            return DoctorFinding(name, "broken", f"{type(error).__name__}: {str(error)[:120]}")
        need, lacking_device = missing
        return DoctorFinding(name, "absent", f"{lacking_device} has no {need}")
    return None


def _train_step(model: "Model") -> None:
    import torch

    from manyformer.recipes.parts.registry import task_of
    from manyformer.training.step_job import StepJob, own_engine

    task = task_of(model)
    generator = torch.Generator().manual_seed(0)
    length = task.fixed_length(model) or min(TRIED_TOKENS, model.max_length or TRIED_TOKENS)
    tokens = torch.randint(task.token_ids(model), (TRIED_ROWS, length), generator=generator)
    inputs = task.example(model, tokens)
    targets = task.random_targets(model, inputs, generator)
    StepJob(own_engine(model, autocast=None), [task.batch(model, inputs, targets)])()
