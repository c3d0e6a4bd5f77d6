"""The contracts that decoding from a state, also from selected rows of it, gives the same outputs as one pass."""

from collections.abc import Sequence

import torch

from manyformer.analysis.contracts.subject import Untestable
from manyformer.analysis.contracts.trial import ContractFinding, ContractTrial, contract

NEEDS = ("incremental_decoding", "per_token")

ROW_ORDERS = ((2, 0, 0, 1, 2), (4, 3, 2, 1, 0))
STEPS_PER_ORDER = 4


@contract("cached", "token by token from a state == one pass", needs=NEEDS, exact=True)
def cached(trial: ContractTrial) -> ContractFinding:
    """Compare steps of one token from the initial state with one pass."""
    inputs = trial.draw(2, trial.length)
    full = trial.subject(inputs).logits
    steps, _ = trial.run_in_chunks(inputs, [1] * trial.length)
    for column in range(trial.length):
        trial.compare(steps[:, column], full[:, column], f"step by step, token {column}")
    return trial.finding(f"{trial.length} single steps give the same as one pass")


@contract("prefill", "in chunks from a state == one pass", needs=NEEDS, exact=True)
def prefill(trial: ContractTrial) -> ContractFinding:
    """Compare chunks of several sizes with one pass."""
    inputs = trial.draw(2, trial.length)
    full = trial.subject(inputs).logits
    chunkings = chunk_sizes(trial)
    for sizes in chunkings:
        trial.compare(trial.run_in_chunks(inputs, sizes)[0], full, f"in chunks of {format_sizes(sizes)}")
    return trial.finding(f"{'; '.join(map(format_sizes, chunkings))} tokens at a time give the same as one pass")


def chunk_sizes(trial: ContractTrial) -> list[list[int]]:
    """Several divisions of a text into chunks; if the model is not `chunked`, a prompt and single tokens."""
    length = trial.length
    half = trial.length // 2
    if not trial.subject.chunked:
        return [[half] + [1] * (length - half), [length - 1, 1]]
    # 3 divides no power of two, so that chunks end inside of blocks, buckets and windows
    threes = [3] * (length // 3) + ([length % 3] if length % 3 else [])
    return [threes, [1, 3, length - 4], [length - 1, 1], [half, length - half]]


def format_sizes(sizes: Sequence[int]) -> str:
    """The chunk sizes as short text."""
    if len(sizes) <= 4:
        return "+".join(map(str, sizes))
    return f"{sizes[0]}+{sizes[1]}+..."


@contract("preallocated", "a preallocated state == one pass", needs=(*NEEDS, "capacity"), exact=True)
def preallocated(trial: ContractTrial) -> ContractFinding:
    """Compare states with exactly enough and with more capacity, fed a chunk and then single tokens, with one pass."""
    inputs = trial.draw(2, trial.length)
    half = trial.length // 2
    full = trial.subject(inputs).logits
    # exactly full shows writes beyond the end, spare room shows what is read of unwritten slots
    for capacity in (trial.length, trial.length + 7):
        actual, _ = trial.run_in_chunks(inputs, [half] + [1] * (trial.length - half), capacity=capacity)
        trial.compare(actual, full, f"with a capacity of {capacity} tokens")
    return trial.finding("preallocated states give the same as one pass")


@contract("rewind", "a state can be continued twice", needs=(*NEEDS, "rewind"), exact=True)
def rewind(trial: ContractTrial) -> ContractFinding:
    """Continue one state with two different texts, then with the first again: decoding must not change the state."""
    first = trial.draw(2, trial.length)
    half = trial.length // 2
    new_tokens = trial.different_tokens(first.tokens[:, half:])
    second = first._replace(tokens=torch.cat([first.tokens[:, :half], new_tokens], dim=1))
    _, state = trial.run_in_chunks(first, [half])
    # the first text again shows what the second one wrote into shared tensors
    for inputs, where in ((first, "first"), (second, "second"), (first, "first again")):
        actual = trial.subject(inputs.columns(half, trial.length), state).logits
        trial.compare(actual, trial.subject(inputs).logits[:, half:], f"the {where} continuation of one state")
    return trial.finding("two continuations of one state, each as in one pass")


@contract("decode", "one-token steps == forward", needs=(*NEEDS, "capacity"), exact=True)
def decode(trial: ContractTrial) -> ContractFinding:
    """Decode a text by the one-token steps that generation uses and by `forward`; then continue both by `forward`."""
    inputs = trial.draw(2, trial.length)
    half = trial.length // 2
    make_step = trial.subject.one_token_step()
    if make_step is None:
        raise Untestable(
            f"a {type(trial.subject.module).__name__} offers no one-token steps, so generation calls the model itself"
        )
    for capacity in trial.capacities(trial.length):
        with torch.inference_mode():
            next_token = make_step()
            states = [trial.subject.init_state(inputs, capacity=capacity) for _ in "ab"]
            for column in range(half):
                token = inputs.columns(column, column + 1)
                # the state of an encoder-decoder has the encoded source too
                memory, step_state = states[0] if trial.subject.takes_source else (None, states[0])
                logits, step_state = next_token(token.tokens, step_state, memory)
                expected = trial.subject(token, states[1])
                states = [(memory, step_state) if trial.subject.takes_source else step_state, expected.state]
                trial.compare(logits, expected.logits, f"token {column} with capacity {capacity}")
            # a state is compared by its use: its contents are known to its owner alone
            rest = inputs.columns(half, trial.length)
            after_steps, after_forward = (trial.subject(rest, state).logits for state in states)
            trial.compare(after_steps, after_forward, f"forward after {half} steps with capacity {capacity}")
    return trial.finding(f"{half} one-token steps give the same as forward")


@contract("beams", "a state with selected rows decodes like those rows", needs=NEEDS, exact=True)
def beams(trial: ContractTrial) -> ContractFinding:
    """Reorder the state midway and continue, twice; each row must equal a full pass over its own tokens."""
    for capacity in trial.capacities(trial.length):
        rows = trial.draw(3, trial.length)
        start = trial.length // 2
        _, state = trial.run_in_chunks(rows, [start], capacity=capacity)
        for order in ROW_ORDERS:
            state = trial.subject.reorder(state, order)
            rows = rows.rows(order)
            # rows with the same history get different continuations: they must not share memory
            rows.tokens[:, start:] = trial.tokens(len(order), trial.length - start)
            stop = min(start + STEPS_PER_ORDER, trial.length)
            actual, state = trial.run_in_chunks(rows.columns(start, stop), [1] * (stop - start), state=state)
            full = trial.subject(rows).logits
            trial.compare(actual, full[:, start:stop], f"after rows {list(order)} were selected")
            start = stop
    return trial.finding("selected rows, also repeated and dropped ones, decode independently")
