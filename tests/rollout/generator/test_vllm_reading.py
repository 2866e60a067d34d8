"""The real engine where somebody reads: it ends at stop texts, and tells of tokens as it samples them."""

from __future__ import annotations

from itertools import pairwise

from tokenizers import Tokenizer, decoders, models

from rollout.generator.engines.base import Sampled
from tests.rollout.generator.vllm_rig import PROBE, TOLERANCE, VOCABULARY, Rig

LETTERS = [chr(0x4E00 + id) for id in range(VOCABULARY)]  # one for each id


def text(ids: list[int]) -> str:
    return "".join(LETTERS[id] for id in ids)


def test_it_ends_with_the_token_that_completes_a_stop_text(rig: Rig) -> None:
    tokenizer = Tokenizer(models.WordLevel({letter: id for id, letter in enumerate(LETTERS)}, LETTERS[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(rig.folder / "model/tokenizer.json"))
    request = rig.request(PROBE, seed=7, max_tokens=60)
    (plain,) = rig.generate(request)
    whole = text(plain.token_ids)

    stop = whole[37:40]  # no multiple of the interval in which the engine reports
    (stopped,) = rig.generate(rig.request(PROBE, seed=7, max_tokens=60, stop=["never", stop]))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: whole.index(stop) + 3]
    assert rig.error(request, stopped) < TOLERANCE


def test_who_reads_along_is_told_of_every_few_tokens(rig: Rig) -> None:
    told: list[int] = []

    async def run(stream: bool) -> Sampled:
        told.clear()
        request = rig.request(PROBE, max_tokens=400, stream=stream)
        return await rig.begin(request, lambda sampled: told.append(len(sampled.token_ids)))

    def smallest_step() -> int:
        """One that is late reads two outputs as one, so not every step is as small."""
        return min(after - before for before, after in pairwise(told))

    assert len(rig.call(run(True)).token_ids) == 400
    assert told[-1] < 400 and smallest_step() <= 4
    rig.call(run(False))
    assert told[-1] < 400 and smallest_step() >= 15
