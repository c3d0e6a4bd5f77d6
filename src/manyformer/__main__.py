"""`python -m manyformer` is the command line."""

from manyformer.cli import main

main()
