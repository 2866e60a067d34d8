"""`fresco show`: episodes of a real run, of one that was killed, and the filters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models

from launch.cli import main
from launch.commands.show import conversation
from rl.store.samples import SampleFile, SampleTurn, read_samples, sample_of
from rl.wire.messages import Ticket, Version
from rollout.episodes.pieces import Pieces
from rollout.episodes.tokenizer import IdTokenizer, load_tokenizer
from tests.envs.model_folder import make_model_folder
from tests.launch.simulated_run import simulated_run
from tests.rollout.trajectories import make_trajectory


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the simulated recipe that kept every group."""
    return simulated_run(tmp_path_factory.mktemp("runs"))


def shown(run: Path, capsys: pytest.CaptureFixture[str], *filters: str) -> str:
    assert main(["show", str(run), *filters]) == 0
    return capsys.readouterr().out


def test_a_run_keeps_whole_groups_and_every_evaluation(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = list(read_samples(played))
    evaluations = [sample for sample in samples if sample.kind == "eval"]
    assert len(evaluations) == 2 * 4  # before the first step and after the last
    training = [sample for sample in samples if sample.kind == "train"]
    assert len(training) >= 3 * 16
    for sample in samples:
        assert len(sample.token_ids) == len(sample.logp) == len(sample.versions)
        for turn in sample.turns:
            assert all(version >= 0 for version in sample.versions[turn.start : turn.end])

    text = shown(played, capsys, "--kind", "eval", "--limit", "100")
    assert text.count("eval task") == 8 and "8 episodes shown" in text and "group" not in text
    group = training[0].group_id
    members = [sample for sample in training if sample.group_id == group]
    assert f"{len(members)} episodes shown" in shown(played, capsys, "--group", str(group), "--limit", "99")
    assert "none of" in shown(played, capsys, "--reward", "123")


def test_the_line_that_a_killed_process_was_writing_is_skipped(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(played, killed)
    whole = len(list(read_samples(killed)))
    written = [path for path in (killed / "samples").iterdir() if path.stat().st_size]  # a late server may have none
    for path in written:
        path.write_bytes(path.read_bytes()[:-20])
    assert written and len(list(read_samples(killed))) == whole - len(written)
    assert "5 episodes shown" in shown(killed, capsys)


def test_the_newest_come_first_and_are_found_by_failure_and_by_reward(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = list(read_samples(played))

    def told(*filters: str) -> list[int]:
        """The tickets that are shown."""
        lines = shown(played, capsys, "--json", "--limit", "999", *filters).splitlines()
        return [json.loads(line)["ticket_id"] for line in lines]

    def with_reward(low: float, high: float) -> list[int]:
        return [sample.ticket_id for sample in reversed(samples) if low <= sample.reward <= high]

    assert told() == [sample.ticket_id for sample in reversed(samples)]
    assert told("--failed") == [sample.ticket_id for sample in reversed(samples) if not sample.success]
    middle = sorted(sample.reward for sample in samples)[len(samples) // 2]
    assert told("--reward", f"..{middle}") == with_reward(-9, middle)
    assert told("--reward", f"{middle}..") == with_reward(middle, 9)
    assert told("--reward", f"{middle}..{middle}") == told("--reward", str(middle)) == with_reward(middle, middle)
    assert len(told("--failed")) < len(samples) and with_reward(middle, middle)


@pytest.mark.parametrize("reward", ["much", "..", "nan", "0.8..0.2", "0..nan"])
def test_what_is_no_range_is_told(reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "run", "--reward", reward])
    assert f"{reward!r} is no number and no range such as 0.2..0.8" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["show", "run", "--limit", "-1"], ["report", "run", "--port", "99999"]])
def test_a_number_that_cannot_be_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"{arguments[-1]!r} is no whole number from " in capsys.readouterr().err


def test_a_line_of_json_has_the_texts(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(played, capsys, "--json", "--limit", "1").splitlines()
    episode = json.loads(line)
    newest = list(read_samples(played))[-1]
    texts = [text for turn in episode["turns"] for text in (turn["read"], turn["said"])] + [episode["after"]]
    assert "".join(texts).split() == [str(id) for id in newest.token_ids]
    assert episode["reward"] == newest.reward and episode["tokens"] == len(newest.token_ids)


def test_tokens_are_shown_by_name_and_characters_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_model_folder(tmp_path / "model"))
    text = "a €uro, 中文 and 🙂!"
    ids = tokenizer.encode(f"<|im_start|>{text}<|im_end|>")
    pieces = Pieces(tokenizer)
    assert "".join(pieces.of(ids)) == f"<|im_start|>{text}<|im_end|>"
    assert {"€", "中", "文", "🙂"} <= set(pieces.of(ids)), "each character by itself"
    assert pieces.of([*ids[:1], 99_999]) == ["<|im_start|>", "⟨99999⟩"], "what has no text has its number"
    half = tokenizer.encode("🙂")[:-1]
    assert "".join(pieces.of([*half, *tokenizer.encode(" so")])).endswith(" so"), "half a character hides nothing"

    trajectory = make_trajectory(Ticket(5, 5, 2, 0, Version(0, 3)), seq=1, reward=0.5)
    turn = SampleTurn(1, len(ids), 0.5, "stop", 0)
    sample = replace(sample_of(trajectory), token_ids=ids, logp=[0.0] * len(ids), versions=[3] * len(ids), turns=[turn])
    assert f"{text}<|im_end|>" in "\n".join(map(str, conversation(sample, pieces)))


def test_words_keep_the_space_before_them() -> None:
    """Decoders in the manner of SentencePiece drop the space before the first word of a text."""
    tokenizer = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1}, unk_token="▁Hello"))
    tokenizer.decoder = decoders.Metaspace()

    class Words(IdTokenizer):
        def raw(self, ids: Sequence[int]) -> str:
            return tokenizer.decode(list(ids), skip_special_tokens=False)

    assert Pieces(Words()).of([0, 1]) == [" Hello", " world"]


def test_a_share_of_the_groups_is_kept_whole(tmp_path: Path) -> None:
    kept = SampleFile(tmp_path, "env_server.0.0", 0.25)
    for group in range(400):
        for _ in range(2):
            kept.add(make_trajectory(Ticket(group, group, group, 0, Version(0, 3)), seq=1, reward=1.0))
    kept.close()

    groups = [sample.group_id for sample in read_samples(tmp_path)]
    assert 60 <= len(set(groups)) <= 140
    assert all(groups.count(group) == 2 for group in set(groups))


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err


def test_a_sample_says_what_the_trajectory_said() -> None:
    trajectory = make_trajectory(Ticket(5, 5, 2, 0, Version(0, 3)), seq=1, reward=0.5, versions=[3, 3, 4])
    sample = sample_of(trajectory)
    assert sample.token_ids == trajectory.sequence.token_ids.tolist()
    assert np.allclose(sample.logp, trajectory.sequence.logp_behavior, atol=1e-4)
    assert (sample.reward, sample.success) == (trajectory.reward, trajectory.success)


def test_a_failed_reward_is_shown_as_such() -> None:
    trajectory = make_trajectory(Ticket(5, 5, 2, 0, Version(0, 3)), seq=1, reward=0.0)
    sample = sample_of(replace(trajectory, unrewarded="judge raised TimeoutError"))
    head = str(next(conversation(sample, Pieces(IdTokenizer()))))
    assert "not rewarded: judge raised TimeoutError" in head and "reward 0" not in head
