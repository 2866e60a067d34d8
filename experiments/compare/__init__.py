"""Fresco beside other trainers on tasks of the project's own: `python -m experiments.bench compare NAME`.

A trainer is one file of this folder, imported by its name, with

    PINS: str                            what its own virtual environment has, a list for pip; "" for Fresco's own
    def command(job, python) -> list     the command that trains as the job says
    def rows(job) -> list[Row]           what it has done so far, one row for each training step

Both sides get the same start model, the same questions in the same order, the same reward, group size, tokens and loss.
Questions never come twice, so the accuracy of a training batch is that of unseen ones under the weights of that moment.
"""
