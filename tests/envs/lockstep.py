"""A synthetic environment that writes down when a step begins (B) and ends (E), a file per server process."""

from __future__ import annotations

import os
from pathlib import Path

from envs.synthetic import SyntheticEnvironment, SyntheticFamily, SyntheticOptions
from rollout.episodes.environment import Step


class LockstepOptions(SyntheticOptions):
    folder: Path
    """Where each server writes its file, named by its process id."""


class LockstepFamily(SyntheticFamily):
    Options = LockstepOptions

    def __init__(self, options: LockstepOptions, seed: int) -> None:
        super().__init__(options, seed)
        self.log = (options.folder / f"{os.getpid()}.steps").open("ab", buffering=0)

    def make(self) -> SyntheticEnvironment:
        return LockstepEnvironment(self)


class LockstepEnvironment(SyntheticEnvironment):
    def __init__(self, family: LockstepFamily) -> None:
        super().__init__(family)
        self._log = family.log

    async def step(self, action: str, truncated: bool = False) -> Step:
        self._log.write(b"B")
        try:
            return await super().step(action, truncated)
        finally:
            self._log.write(b"E")


def steps_out_of_turn(folder: Path) -> tuple[int, int]:
    """(steps begun, those begun after another one had ended and before all that ran had), over all servers.

    None is out of turn in lock-step, if every step takes longer than it takes to begin them all.
    """
    begun = out_of_turn = 0
    for path in folder.glob("*.steps"):
        running = 0
        ending = False

        for event in path.read_text():
            if event == "B":
                ending = ending and running > 0
                begun += 1
                out_of_turn += ending
            else:
                ending = True
            running += 1 if event == "B" else -1
    return begun, out_of_turn
