"""The contract that the one-token steps that generation uses equal `forward`, states included."""

import torch

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, Untestable, WorstDifference
from manyformer.core import State
from manyformer.models import GenerativeModel


@contract("decode", "one-token steps == forward", needs=("incremental_decoding", "per_token", "capacity"), exact=True)
def decode(trial: ContractTrial) -> ContractFinding:
    """Decode a text by the bound steps and by `forward`; then continue both states by `forward`."""
    worst, inputs, half = WorstDifference(), trial.draw(2, trial.length), trial.length // 2
    model = trial.subject.module
    if not isinstance(model, GenerativeModel):
        raise Untestable(f"a {type(model).__name__} offers no one-token steps, so generation calls the model itself")
    for capacity in (None, trial.length):
        with torch.inference_mode():
            next_token, states = model.next_token(), [trial.subject.init_state(inputs, capacity=capacity) for _ in "ab"]
            for column in range(half):
                token = inputs.columns(column, column + 1)
                memory, step_state = states[0] if trial.subject.takes_source else (None, states[0])
                logits, step_state = next_token(token.tokens, step_state, memory)
                expected = trial.subject(token, states[1])
                states = [_join(trial, memory, step_state), expected.state]
                worst.add(logits, expected.logits, f"token {column} with capacity {capacity}")
            # a state is compared by its use: its contents are known to its owner alone
            rest = inputs.columns(half, trial.length)
            after_steps, after_forward = (trial.subject(rest, state).logits for state in states)
            worst.add(after_steps, after_forward, f"forward after {half} steps with capacity {capacity}")
    return worst.finding(f"{half} one-token steps give the same as forward", trial.tolerance)


def _join(trial: ContractTrial, memory: State, state: State) -> State:
    """The subject's state: an encoder-decoder's has the encoded source too."""
    return (memory, state) if trial.subject.takes_source else state
