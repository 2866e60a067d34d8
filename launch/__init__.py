"""What turns a recipe into a run: the command line, the supervisor of all processes, and the warm start of small
models."""

import rl  # noqa: F401  so that modules that moved are named from the first import on

__version__ = "0.1.0"
