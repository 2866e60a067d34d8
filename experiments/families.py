"""The tables of families in docs/models.md, between its first heading and `model.untested`.

    python -m experiments.families

What is in the first one is run by tests: tests/rl/models/test_families.py and, with vLLM, `pytest -m families`.
"""

from __future__ import annotations

from rl.models.families import BY_REASON, FAMILIES


def families() -> str:
    rows = [
        f"| `{name}` | {family.models} | {'mixture of experts' if family.routing else 'dense'} |"
        for name, family in FAMILIES.items()
    ]
    return "\n".join(["| `model_type` | models, for example | kind |", "|---|---|---|", *rows])


def refused() -> str:
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in BY_REASON.items()]
    return "\n".join(["| `model_type` | reason |", "|---|---|", *rows])


if __name__ == "__main__":
    print(families(), refused(), sep="\n\n")
