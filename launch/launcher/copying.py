"""The head's part in what a learner's machine makes: it copies it, and says from what the ranks begin elsewhere.

Where the ranks write into the head's own folder it is the other way round: another machine gets a copy. Two machines
have each checkpoint either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from launch.launcher.copies import TIMELINES, Copies, step_of
from launch.launcher.folders import Fetcher, Opened, known_changes, made_in
from launch.launcher.node_messages import Ask, Begin, FromHead, Part, Sent, Want, boot_time
from rl.learner.changes import CHANGES, WISH, Change
from rl.wire.run import RunFile

_AGAIN_S = 2.0
_IDLE_S = 30.0  # after which a machine that asks for no part of a checkpoint is told of a newer one


class Copying:
    """Called by the launcher, which holds its lock."""

    def __init__(self, run: RunFile, send: Callable[[bytes, FromHead], None]) -> None:
        self._run = run
        self._send = send
        self.copies = Copies()
        self.heard = boot_time()
        """When something was said of it, or came."""
        self._fetcher = Fetcher(run.folder, run.save_s)
        self.came = 0.0
        """Another number whenever something has come (`Fetcher.came`)."""
        self._under_way: tuple[str, str] | None = None
        self._asked_at = float("-inf")
        self._incarnation = ""  # of the ranks
        self._begin: Begin | None = None  # what its rank 0 was told

        self._sending: Opened | None = None
        self._second: Opened | None = None  # what another machine is to hold as well
        self._asked_for_at = 0.0
        self._undoing = False  # what is copied now may be taken back

    # ------------------------------------------------------------ the ranks begin

    def go_on(self, place: bytes) -> None:
        """The ranks stood there under the head before."""
        self.copies.begin(place, made_in(self._run.folder))

    def may_begin(self, rank: str) -> bool:
        """Whether it is known where rank 0 of this incarnation stands; rank 0 waits until a checkpoint that is here has
        its name, and counts."""
        _, index, incarnation = rank.split(".")
        return not self.is_finishing if index == "0" else incarnation == self._incarnation

    @property
    def is_finishing(self) -> bool:
        """Whether all of a folder is here, which is compared with its digests and written to the disk."""
        return self._fetcher.is_finishing

    def begin(self, rank: str, place: bytes) -> Begin | None:
        """What a rank is to be told that begins there. Where ranks may have several folders, all begin from what
        counts: each of them can have that."""
        _, index, incarnation = rank.split(".")
        if index == "0":
            self._incarnation = incarnation
            several = bool(place) and self._run.config.learner.ranks > 1
            self._begin = self._rank_0_begins(int(incarnation), place, several)

        elif place != self.copies.place and incarnation != "0" and self._begin is None:
            return self._from_what_counts(self._run.timeline)  # rank 0 goes on in the head's folder
        return self._begin

    def _rank_0_begins(self, incarnation: int, place: bytes, several: bool) -> Begin | None:
        self._fetcher.cancel()
        self._under_way = self._second = None
        if not self.copies.begin(place, made_in(self._run.folder), always=several):
            return None
        if not place:
            self._fetcher.forget_others(self.copies.counts or "")
        (self._run.folder / "versions.jsonl").unlink(missing_ok=True)  # of ranks that stood here
        print(f"the ranks begin from {self.copies.counts or 'the start'}", flush=True)
        return self._from_what_counts(self._run.timeline + incarnation * TIMELINES)

    def _from_what_counts(self, timeline: int) -> Begin:
        name = self.copies.counts or ""
        self._sending = Opened(self._run.folder, name) if name else None
        files = self._sending.files if self._sending else {}
        return Begin(timeline, name, self.copies.held.get(name, ""), files, known_changes(self._run.folder))

    def part(self, ask: Ask) -> Part | None:
        """Of the checkpoint from which the ranks begin, or that another machine is to hold. Raises ProtocolError."""
        for opened in (self._second, self._sending):
            if opened is not None and ask.file in opened.files:
                self._asked_for_at = boot_time()
                return opened.part(ask)
        return None

    def _made(self, name: str) -> None:
        """All ranks have: none fetches what they began from any more. It keeps its room as long as it is open."""
        if self._sending is not None and step_of(name) > step_of(self._sending.name):
            self._sending = None

    def hold(self, agent: bytes, made: Mapping[str, str]) -> None:
        """The ranks write into the head's folder, which its machine alone may have: this one is to hold the newest
        checkpoint as well. made: what it has. Call it at each of its beats."""
        known = self._second
        if known is not None and made.get(known.name) != known.digest and boot_time() < self._asked_for_at + _IDLE_S:
            self._send(agent, Sent(known.name, known.files))
            return

        self._second = None
        here = made_in(self._run.folder)
        name = max(here, key=step_of, default="")
        self._made(name)
        if step_of(name) < 0 or made.get(name) == here[name]:
            return
        self._asked_for_at = boot_time()
        with contextlib.suppress(OSError):  # replaced just now
            self._second = Opened(self._run.folder, name)
            self._send(agent, Sent(name, self._second.files))

    # ------------------------------------------------------------ they are changed while they go on

    def wish(self, agent: bytes) -> bytes:
        """What is asked of ranks that do not see it in the head's folder; nothing of other machines.

        What an undo takes back counts no more, whether the ranks have done it or are lost before they could say so.
        """
        if not agent or agent != self.copies.place:
            return b""
        wish, undo = b"", None
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            wish = (self._run.folder / WISH).read_bytes()
            undo = msgspec.json.decode(wish, type=Change).undo

        self._undoing = undo is not None
        if undo is not None:
            if self._fetcher.is_busy:  # with what may be taken back
                return b""
            self._fetcher.drop_checkpoints(self.copies.take_back(undo))
        return wish

    def answered(self, agent: bytes, wish: bytes, changes: bytes) -> None:
        """What was made of it. The changes stand here before the wish is gone: who asked looks for them then."""
        if not agent or agent != self.copies.place:
            return
        known = known_changes(self._run.folder)
        if changes.startswith(known) and changes != known:
            with (self._run.folder / CHANGES).open("ab") as file:
                file.write(changes[len(known) :])
        if wish and wish == self.wish(agent):
            (self._run.folder / WISH).unlink(missing_ok=True)

    # ------------------------------------------------------------ what they make is copied

    def turn(self) -> None:
        """Ask for what is wanted. Call it ten times a second."""
        now = boot_time()
        place = self.copies.place
        if (came := self._fetcher.came(now)) != self.came:
            self.came = came
            self.heard = now

        whole = None
        with self._telling():
            whole = self._fetcher.ended()
        if whole is not None and self._under_way is not None:
            if whole:
                self._fetcher.drop_checkpoints(self.copies.arrived(*self._under_way))
                self._made(self._under_way[0])
            else:
                print(f"! {self._under_way[0]} was damaged on its way, and is copied again", flush=True)
            self._under_way = None
            self._asked_at = float("-inf")

        wanted = None if self._fetcher.is_busy or self._undoing else self.copies.wanted()
        if wanted is not None and place and now >= self._asked_at + _AGAIN_S:
            self._asked_at = now
            self._send(place, Want(wanted[0]))
        self._ask(now)

    def sent(self, agent: bytes, sent: Sent) -> None:
        """What a wanted folder consists of. Raises ProtocolError."""
        wanted = self.copies.wanted()
        if agent != self.copies.place or wanted is None or self._fetcher.is_busy or self._undoing:
            return
        if wanted == (sent.name, sent.digest):
            with self._telling():
                self._under_way = wanted
                self._fetcher.begin(sent.name, sent.files)
                self._ask(boot_time())

    def take(self, agent: bytes, part: Part) -> None:
        with self._telling():
            if agent == self.copies.place and self._fetcher.take(part, boot_time()):
                self._ask(boot_time())

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """A full disk ends a copy, and it is tried again; the run ends where it cannot write itself."""
        try:
            yield
        except OSError as error:
            name = self._under_way[0] if self._under_way is not None else "a folder"
            print(f"! {name} cannot be copied to {self._run.folder}: {error}", flush=True)
            self._under_way = None
            self._fetcher.cancel()

    def _ask(self, now: float) -> None:
        for ask in self._fetcher.asks(now):
            self._send(self.copies.place or b"", ask)

    def still_to_come(self, agents: Collection[bytes]) -> str:
        """What is not copied yet; nothing where the machine that has it is gone, and is needed."""
        wanted = self._under_way if self.is_finishing else self.copies.wanted()
        if wanted is None or not (self.is_finishing or self.copies.place in agents):
            self.heard = boot_time()
            return ""
        return wanted[0]

    def close(self) -> None:
        self._fetcher.close()
        self._second = self._sending = None
