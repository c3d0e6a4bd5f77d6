"""`python -m manyformer` is the command line."""

import os
import sys

# Python looks for modules in the current folder first, whose files may have the names of modules
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from manyformer.cli import main

main()
