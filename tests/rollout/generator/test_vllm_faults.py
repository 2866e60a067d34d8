"""Weights that a real engine holds and nobody published: its own answers must give it away (docs/silent-faults.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rl.weights.updater import Expected, LoadProof, tolerance
from rl.wire.messages import Version, WeightStatus
from tests.rollout.generator.vllm_rig import PROBE, Rig


def probe(model: Any, weights: dict[str, torch.Tensor]) -> np.ndarray:
    """What a learner with these weights expects of the probe."""
    with torch.no_grad():
        logits = torch.func.functional_call(model, weights, (torch.tensor([PROBE]),)).logits[0, :-1]
    logp: np.ndarray = logits.double().log_softmax(-1).gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].numpy()
    return logp


def loaded(rig: Rig, weights: dict[str, torch.Tensor]) -> WeightStatus:
    """The engine's report of a load that brought it these weights."""
    rig.n += 1
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, rig.folder / "writing")
    (rig.folder / "writing").rename(rig.folder / f"weights.{rig.n}.safetensors")
    return rig.call(rig.engine.load(Version(0, rig.n), PROBE))


@pytest.mark.parametrize("fault", ["none", "undelivered", "half", "stale head"])
def test_the_proof_sees_what_the_engine_holds(rig: Rig, fault: str) -> None:
    old = {name: tensor.clone() for name, tensor in rig.model(0).state_dict().items()}
    new = {name: tensor.clone() for name, tensor in rig.model(1).state_dict().items()}
    applied = {
        "none": new,
        "undelivered": old,
        "half": {name: (new if place % 2 else old)[name] for place, name in enumerate(new)},
        "stale head": new | {"lm_head.weight": old["lm_head.weight"]},
    }[fault]

    proof = LoadProof(tolerance(rig.run.config), probe=True)
    for weights, arrived in ((old, old), (new, applied)):
        status = loaded(rig, arrived)
        proof.add(Expected(status.version, status.checksum, tuple(PROBE), probe(rig.model(0), weights)))
        found = proof.fault(status)
        assert (found is None) == (weights is old or fault == "none"), found
    rig.update()
