"""The real engine against transformers: log-probabilities, versions per token, and the four update policies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from rl.wire.messages import Version
from rollout.generator.engines.base import Sampled
from tests.rollout.generator.vllm_rig import KV_BYTES, MAX_MODEL_LEN, MAX_NUM_SEQS, PROBE, SHAPE, TOLERANCE, Rig

pytestmark = pytest.mark.slow


def prompts(count: int) -> list[list[int]]:
    return [[1 + (7 * i + j) % 255 for j in range(5 + 3 * i % 40)] for i in range(count)]


@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}])
def test_logp_is_of_the_distribution_sampled_from(rig: Rig, distribution: dict[str, float]) -> None:
    requests = [rig.request(prompt, **distribution) for prompt in prompts(8)]
    results = rig.generate(*requests)
    assert max(rig.error(a, b, **distribution) for a, b in zip(requests, results, strict=True)) < TOLERANCE
    assert {tuple(set(result.policy_version)) for result in results} == {(rig.n,)}


def test_greedy_takes_the_most_likely_token(rig: Rig) -> None:
    import torch

    (result,) = rig.generate(rig.request(PROBE, temperature=0.0))
    with torch.no_grad():
        logits = rig.model(rig.n)(torch.tensor([PROBE + result.token_ids])).logits[0]
    assert logits.argmax(-1)[len(PROBE) - 1 : -1].tolist() == result.token_ids


def test_weights_and_probe_follow_each_update(rig: Rig) -> None:
    for _ in range(2):
        report = rig.update()
        assert report.version == Version(0, rig.n)
        assert np.abs(np.array(report.probe_logp) - rig.reference(rig.n, PROBE)).max() < TOLERANCE
        spent = report.seconds
        assert min(spent["load"], spent["drain"]) > 0 and spent["drain"] + spent["load"] < spent["pause"]
        requests = [rig.request(prompt) for prompt in prompts(4)]
        results = rig.generate(*requests)
        assert max(rig.error(*pair) for pair in zip(requests, results, strict=True)) < TOLERANCE
        assert all(result.policy_version == [rig.n] * 24 for result in results)


def test_each_token_is_tagged_with_the_weights_that_sampled_it(rig: Rig) -> None:
    """Many requests over five updates, with a consumer that lags behind the engine at each of them."""
    requests = [rig.request(prompt, max_tokens=300) for prompt in prompts(MAX_NUM_SEQS + 12)]
    for update in range(1, 6):
        rig.write(rig.n + update)  # not while the engine goes on

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(requests)
        for update in range(5):
            while sum(tokens) < (update + 0.5) / 5 * 300 * MAX_NUM_SEQS:
                await asyncio.sleep(0.01)
            time.sleep(0.05)  # the loop sleeps: outputs of the old weights pile up unconsumed
            await rig.next()
        return await asyncio.gather(*tasks)

    results = rig.call(run())
    assert max(rig.error(*pair) for pair in zip(requests, results, strict=True)) < TOLERANCE
    boundaries = sum(len(set(result.policy_version)) - 1 for result in results)
    assert boundaries > 2 * MAX_NUM_SEQS
    assert all(result.tokens_generated == len(result.token_ids) == 300 for result in results)


def test_keep_continues_on_old_kv_and_new_episodes_see_none_of_it(rig: Rig) -> None:
    rig.engine.on_update = "keep"
    prompt = [1 + i % 250 for i in range(300)]  # more than two cache blocks
    rig.publish(rig.n + 1)

    async def run() -> tuple[list[Sampled], list[Sampled]]:
        requests = [rig.request(prompt, session=100_000 + i, max_tokens=150) for i in range(MAX_NUM_SEQS)]
        running, tokens = rig.watch(requests)
        waiting = [rig.begin(rig.request(prompt, session=200_000 + i)) for i in range(4)]
        while min(tokens) < 10:
            await asyncio.sleep(0.005)
        await rig.load_next()
        return await asyncio.gather(*running), await asyncio.gather(*waiting)

    running, waiting = rig.call(run())
    request = rig.request(prompt)
    assert all(set(result.policy_version) == {rig.n - 1, rig.n} for result in running)
    assert min(rig.error(request, result) for result in running) > 0.1  # new weights on the KV of the old ones
    assert all(result.policy_version == [rig.n] * 24 for result in waiting)
    assert max(rig.error(request, result) for result in waiting) < TOLERANCE  # had not begun: began again
    old, new = rig.generate(rig.request(prompt, session=100_000), request)
    assert rig.error(request, new) < TOLERANCE
    assert rig.error(request, old) > 0.1  # a later turn of an old episode finds its own KV
    rig.engine.on_update = "recompute"
    rig.update()  # what was kept goes: a run has one of these policies, the tests share an engine


def test_abort_restarts_what_was_running(rig: Rig) -> None:
    rig.engine.on_update = "abort"
    requests = [rig.request(prompt, max_tokens=400) for prompt in prompts(8)]
    rig.publish(rig.n + 1)

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(requests)
        while min(tokens) < 10:
            await asyncio.sleep(0.005)
        await rig.load_next()
        return await asyncio.gather(*tasks)

    for request, result in zip(requests, rig.call(run()), strict=True):
        assert result.policy_version == [rig.n] * 400
        assert rig.error(request, result) < TOLERANCE
        assert 400 < result.tokens_generated < 800  # the discarded ones count


def test_drain_lets_running_requests_end_under_the_old_weights(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.engine.on_update = "drain"
    monkeypatch.setattr("rollout.generator.engines.vllm.DRAIN_S", 240)
    before = [rig.request(prompt, max_tokens=60) for prompt in prompts(4)]
    during = rig.request(PROBE)

    results, late = rig.update_amid(before, during)
    assert all(result.policy_version == [rig.n - 1] * 60 for result in results)
    assert late.policy_version == [rig.n] * 24 and rig.error(during, late) < TOLERANCE


def test_drain_falls_back_to_recompute_at_its_deadline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.engine.on_update = "drain"
    monkeypatch.setattr("rollout.generator.engines.vllm.DRAIN_S", 0.01)
    request = rig.request(PROBE, max_tokens=400)
    rig.publish(rig.n + 1)

    async def run() -> Sampled:
        (task,), tokens = rig.watch([request])
        while not tokens[0]:
            await asyncio.sleep(0.005)
        await rig.load_next()
        return await task

    result = rig.call(run())
    assert set(result.policy_version) == {rig.n - 1, rig.n}
    assert rig.error(request, result) < TOLERANCE


def test_abort_answers_with_the_partial_result(rig: Rig) -> None:
    request = rig.request(PROBE, max_tokens=400)

    async def run() -> tuple[Sampled, Sampled]:
        (task,), tokens = rig.watch([request])
        while tokens[0] < 2:
            await asyncio.sleep(0.005)
        await rig.engine.abort(request.request_id)
        await rig.engine.abort(123_456_789)  # unknown: nothing happens
        second = rig.request(PROBE, max_tokens=400)
        early = rig.begin(second)
        await asyncio.sleep(0)
        await rig.engine.abort(second.request_id)
        return await task, await early

    partial, early = rig.call(run())
    assert partial.finish_reason == early.finish_reason == "abort"
    assert 1 < len(partial.token_ids) == partial.tokens_generated < 400
    assert len(early.token_ids) == early.tokens_generated < 400
    assert rig.error(request, partial) < TOLERANCE


def test_a_request_aborted_during_a_load_ends_at_once(rig: Rig) -> None:
    request = rig.request(PROBE)
    hold = rig.folder / "hold"

    async def run() -> Sampled:
        hold.touch()
        load = asyncio.create_task(rig.next())
        while rig.engine._open:
            await asyncio.sleep(0)
        try:
            task = rig.begin(request)
            await asyncio.sleep(0)
            await rig.engine.abort(request.request_id)
            result = await asyncio.wait_for(task, 60)
            assert not load.done()
        finally:
            hold.unlink()  # the load goes on when the request has ended
        await load
        return result

    result = rig.call(run())
    assert (result.finish_reason, result.token_ids, result.tokens_generated) == ("abort", [], 0)


def test_stop_token_is_the_last_id_and_length_cuts(rig: Rig) -> None:
    (free,) = rig.generate(rig.request(PROBE, temperature=0.0))
    stop = free.token_ids[10]
    (stopped,) = rig.generate(rig.request(PROBE, temperature=0.0, stop_token_ids=[stop]))
    assert free.finish_reason == "length" and stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_progress_begins_at_the_first_token_grows_and_leaves_the_end_to_the_result(rig: Rig) -> None:
    seen: list[tuple[int, int, int]] = []

    def note(sampled: Sampled) -> None:
        seen.append((len(sampled.token_ids), len(sampled.logp), len(sampled.policy_version)))

    async def run() -> Sampled:
        return await rig.begin(rig.request(PROBE, max_tokens=100), note)

    result = rig.call(run())
    assert seen[0] == (1, 1, 1) and seen[-1] < (100, 100, 100) and len(result.token_ids) == 100
    assert seen == sorted(seen) and all(len(set(lengths)) == 1 for lengths in seen)
    assert 1 < len(seen) < 15  # not a task switch per token


def test_a_request_that_does_not_fit_fails_alone(rig: Rig) -> None:
    with pytest.raises(ValueError, match="length"):
        rig.generate(rig.request([1] * (MAX_MODEL_LEN + 1)))
    (result,) = rig.generate(rig.request([1] * (MAX_MODEL_LEN - 3)))
    assert (len(result.token_ids), result.finish_reason) == (3, "length")


def test_kv_capacity_is_the_real_one(rig: Rig) -> None:
    token_bytes = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
    assert rig.info.kv_tokens == KV_BYTES // token_bytes
    assert (rig.info.max_num_seqs, rig.info.max_model_len) == (MAX_NUM_SEQS, MAX_MODEL_LEN)


def test_a_torn_read_is_repeated_before_anything_runs(rig: Rig) -> None:
    (rig.folder / "torn").touch()
    report = rig.update()
    assert not (rig.folder / "torn").exists()
    assert np.abs(np.array(report.probe_logp) - rig.reference(rig.n, PROBE)).max() < TOLERANCE


def test_a_newer_version_than_asked_is_loaded_and_reported(rig: Rig) -> None:
    rig.n += 2
    rig.publish(rig.n)
    report = rig.call(rig.engine.load(Version(0, rig.n - 1), PROBE))
    assert report.version == Version(0, rig.n)


def test_missing_weights_are_an_error(rig: Rig) -> None:
    rig.n += 1
    rig.publish(rig.n, without="model.layers.1.mlp.down_proj.weight")
    with pytest.raises(Exception, match=r"lack 1 parameters.*down_proj"):
        rig.call(rig.engine.load(Version(0, rig.n), PROBE))
    assert not rig.engine._open
    rig.update()


def test_vllm_s_internals_are_as_we_use_them(rig: Rig) -> None:
    from vllm.inputs.engine import tokens_input

    from rollout.generator.engines.cpu.vllm_thread import OwnThread
    from rollout.generator.engines.vllm_process import OwnProcess
    from rollout.generator.engines.vllm_settings import sampling_params

    core = rig.engine._core
    assert isinstance(core, OwnProcess if rig.own_process else OwnThread)
    if isinstance(core, OwnProcess):
        (process,) = core.processes
        assert process.is_alive() and process.pid in {child.pid for child in rig.processes}

    async def run() -> tuple[list[tuple[str, int]], str | None]:
        parameters = sampling_params(rig.request(PROBE, max_tokens=400))
        stream = await core.begin("internals", tokens_input(PROBE), parameters, 0)
        assert stream.spans == []
        output = await stream.next()
        assert not output.finished and 1 <= len(output.outputs[0].token_ids) < 400  # several where this loop was late
        spans = list(stream.spans)
        await stream.abort()
        while not output.finished:
            output = await stream.next()
        stream.close()
        return spans, output.outputs[0].finish_reason

    assert rig.call(run()) == ([(f"0.{rig.n}", 0)], "abort")


@pytest.mark.docs
@pytest.mark.slow
def test_the_engine_process_dies_with_a_killed_generator(tied_rig: Rig) -> None:
    rig = tied_rig  # whose engine has a process of its own
    script = f"""
        import asyncio, os
        from rl.wire.run import ProcessContext, RunFile
        from rollout.generator.engines import vllm, vllm_settings
        vllm_settings._WORKER_EXTENSION = "tests.rollout.generator.watched_worker.Watched"

        async def main():
            await vllm.VllmEngine(ProcessContext(RunFile.load({str(rig.folder)!r}), 1, 0)).start()
            print("up", flush=True)
            await asyncio.sleep(600)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    path = rig.folder / "generator.py"
    path.write_text(textwrap.dedent(script))
    # What it leaves in its temporary folder goes with the rig.
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(rig.folder)}
    generator = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, env=environment)
    assert generator.stdout is not None and generator.stdout.readline() == "up\n"
    children = psutil.Process(generator.pid).children(recursive=True)
    generator.kill()
    generator.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert children and not alive
