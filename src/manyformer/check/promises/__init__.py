"""One module a promise; importing this package lists them all, in the order of a report."""

from manyformer.check.promises import (  # isort: skip
    repeatable as repeatable,
    causality as causality,
    streaming as streaming,
    beams as beams,
    padding as padding,
    batching as batching,
    packing as packing,
    empty_rows as empty_rows,
    gradients as gradients,
    losses as losses,
    precision as precision,
    compiling as compiling,
    saving as saving,
    learning as learning,
)
