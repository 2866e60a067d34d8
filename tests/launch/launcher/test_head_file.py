"""What a head has written says, to the next one, what may be left of the run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launch.launcher.head_file import FILE, Began, HeadFile, Line, Listens, Machine, Ranks, read_before
from rl.observe.trace import boot_id

AGENTS = st.sampled_from(["agent.a", "agent.b"])
LINES: st.SearchStrategy[Line] = st.one_of(
    st.builds(Machine, AGENTS, st.booleans()),
    st.builds(Began, st.sampled_from(["broker.0", "learner.1"])),
    st.builds(Ranks, AGENTS | st.just("")),
    st.just(Listens(1, 2, boot_id())),
)


@given(lines=st.lists(LINES), heads=st.integers(1, 3))
def test_the_newest_incarnations_and_those_that_belong_to_the_run_are_known(lines: list[Line], heads: int) -> None:
    there: set[str] = set()
    newest: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, line in enumerate(lines):
            if number % heads == 0:
                file = HeadFile(folder)  # of another head
            if isinstance(line, Began):
                newest[line.name] = newest.get(line.name, -1) + 1
                line = Began(f"{line.name}.{newest[line.name]}")
            if isinstance(line, Machine):
                (there.add if line.there else there.discard)(line.agent)
            file.write(line)

        before = read_before(folder)
        assert before.newest == newest and before.agents == there
        assert before.may_go_on == any(isinstance(line, Listens) for line in lines)
        places = [line.place for line in lines if isinstance(line, Ranks)]
        assert before.ranks == (places[-1] if places else None)


def test_nobody_goes_on_after_the_machine_was_started_anew_or_the_run_has_ended(tmp_path: Path) -> None:
    assert not read_before(tmp_path).may_go_on
    file = HeadFile(tmp_path)
    file.write(Listens(1, 2, "an earlier boot"))
    assert read_before(tmp_path).listens is not None and not read_before(tmp_path).may_go_on
    file.write(Listens(1, 2, boot_id()))
    with (tmp_path / FILE).open("a") as torn:
        torn.write('{"type":"beg')
    assert read_before(tmp_path).may_go_on
    file.remove()
    assert not read_before(tmp_path).may_go_on
