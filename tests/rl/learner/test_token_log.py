"""The tokens of kept samples, as the learner saw them: of the right ticket, and those of a forward alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from algos.registry import make_loss
from rl.learner.token_log import TokenLog
from rl.learner.update import accumulate_gradients
from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from rl.store.samples import is_kept, read_trained
from tests.rl.learner.tiny_policies import algorithm_of, make_batch_parts, packs_of, save_tiny

RATE = 0.5


@pytest.mark.parametrize("max_tokens", [16, 256])
def test_what_is_kept_is_of_the_right_sample_and_token(tmp_path: Path, max_tokens: int) -> None:
    policy = Policy.load(save_tiny(tmp_path / "model"))
    (batch_part,) = make_batch_parts(1, groups=8)
    rows = [msgspec.structs.replace(row, ticket_id=100 + row.sample_id) for row in batch_part.rows]
    batch_part = msgspec.structs.replace(batch_part, rows=rows)

    kept = TokenLog(tmp_path, "learner.0.0", RATE)
    kept.batch(batch_part)
    packs = packs_of(batch_part, max_tokens)
    algorithm = algorithm_of(make_loss("grpo", {}))
    accumulate_gradients(policy, packs, algorithm, temperature=0.7, global_tokens=batch_part.loss_tokens, observe=kept)
    kept.close()

    trained = read_trained(tmp_path)
    groups = {row.group_id for row in rows if is_kept(row.group_id, RATE)}
    assert 0 < len(groups) < 8, "the seed of the test makes no choice"
    assert set(trained) == {row.ticket_id for row in rows if row.group_id in groups}

    ends = np.cumsum(batch_part.lengths)
    for member, end in zip(batch_part.members, ends, strict=True):
        row = rows[member]
        if row.ticket_id not in trained:
            continue
        part = slice(end - row.tokens, end)
        mask = batch_part.loss_mask[part].astype(bool)
        pack = sequence_pack(batch_part.token_ids[part].tolist()).with_columns(loss_mask=torch.tensor(mask))
        with torch.no_grad():
            alone = policy(pack, temperature=0.7)

        found = trained[row.ticket_id]
        ratio = alone.logp.numpy()[mask] - batch_part.logp_behavior[part][mask]
        assert found.step == batch_part.step
        assert found.log_ratio == pytest.approx(ratio.tolist(), abs=2e-4)
        assert found.entropy == pytest.approx(alone.entropy.numpy()[mask].tolist(), abs=2e-4)
        assert len(set(found.advantage)) == 1 and len(found.advantage) == row.loss_tokens
        assert all(0 <= place < row.loss_tokens for place in found.clipped)
