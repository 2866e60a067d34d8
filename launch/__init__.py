"""What turns a recipe into a run: the command line, the supervisor of all processes, and the warm start of small
models."""

__version__ = "0.1.0"
