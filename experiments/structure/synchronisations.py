"""How often the host reads a tensor within one pack, forward and backward: on a GPU it would wait there each time.

    python experiments/structure/synchronisations.py CHECKOUT

It runs the policy of that checkout, whose forward takes a pack, or the ids and positions of one as it did before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
_LENGTHS = (40, 40, 23, 57)
_VOCABULARY = 96


def synchronisations(root: Path) -> int:
    """In the checkout at `root`, in a process of its own. Raises CalledProcessError where it cannot run."""
    environment = os.environ | {"PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(root)]
    said = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True, timeout=300)
    return int(said.stdout.split()[-1])


def main() -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=96, **shape)
    ids = [torch.randint(0, _VOCABULARY, (length,)) for length in _LENGTHS]

    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        forward = _forward(folder, ids)

    forward().sum().backward()  # what is read once only, at the first forward, does not count
    counted = 0

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def counted_read(*arguments: Any, **options: Any) -> Any:
            nonlocal counted
            counted += 1
            return read(*arguments, **options)

        return counted_read

    for name in _READS:
        setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
    forward().sum().backward()
    print(counted)


def _forward(folder: str, ids: list[Any]) -> Callable[[], Any]:
    """A forward over all of `ids` in one pack, which answers their log-probabilities."""
    import torch

    try:
        from rl.models.packing import sequence_pack
        from rl.models.policy import Policy
    except ImportError:
        from rl.learner.policy import load_policy

        policy: Any = load_policy(folder)
        positions = torch.cat([torch.arange(len(each)) for each in ids])
        return lambda: policy(torch.cat(ids), positions).logp

    now = Policy.load(folder)
    pack = sequence_pack(*(each.tolist() for each in ids)).laid_out()
    return lambda: now(pack).logp


if __name__ == "__main__":
    main()
