"""Modules that stand elsewhere now: an import by the old name fails in one line that has the new one.

A module of a user's own may import `rl.core.columns`, which was its name until the folders were divided anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "algos.diagnostics": "rl.learner.diagnostics",
    "launch.check_env": "launch.commands.check_env",
    "launch.check_loss": "launch.commands.check_loss",
    "launch.chrome_trace": "launch.commands.trace",
    "launch.doctor": "launch.commands.doctor",
    "launch.evaluate": "launch.commands.evaluate",
    "launch.fork_server": "launch.cpu.fork_server",
    "launch.origin": "launch.provenance",
    "launch.plan_cost": "launch.commands.plan",
    "launch.run": "launch.commands.run",
    "launch.show": "launch.commands.show",
    "launch.top": "launch.commands.top",
    "rl.core.alarm_file": "rl.observe.alarm_file",
    "rl.core.alarms": "rl.observe.alarms",
    "rl.core.batch_files": "rl.store.batch_files",
    "rl.core.charts": "rl.observe.charts",
    "rl.core.checkpoint_folder": "rl.store.checkpoint_folder",
    "rl.core.codec": "rl.wire.codec",
    "rl.core.columns": "rl.wire.columns",
    "rl.core.config": "rl.config.schema",
    "rl.core.config_alarms": "rl.config.alarms",
    "rl.core.config_algo": "rl.config.algo",
    "rl.core.config_chat": "rl.config.chat",
    "rl.core.config_rollout": "rl.config.rollout",
    "rl.core.config_section": "rl.config.section",
    "rl.core.config_tree": "rl.config.tree",
    "rl.core.digests": "rl.store.digests",
    "rl.core.failures": "rl.config.failures",
    "rl.core.made_once": "rl.store.made_once",
    "rl.core.messages": "rl.wire.messages",
    "rl.core.messages_control": "rl.wire.messages",
    "rl.core.moments": "rl.observe.trace_events",
    "rl.core.plugins": "rl.config.plugins",
    "rl.core.process": "rl.wire.process",
    "rl.core.receiving": "rl.wire.receiving",
    "rl.core.recent": "rl.store.recent",
    "rl.core.run": "rl.wire.run",
    "rl.core.samples": "rl.store.samples",
    "rl.core.seeds": "rl.config.seeds",
    "rl.core.sequences": "rl.wire.messages",
    "rl.core.sockets": "rl.wire.sockets",
    "rl.core.trace": "rl.observe.trace",
    "rl.core.tracking": "rl.observe.tracking",
    "rl.learner.export": "rl.weights.host.tensors",
    "rl.learner.kept": "rl.learner.token_log",
    "rl.learner.link": "rl.learner.run_client",
    "rl.learner.logprob": "rl.models.head",
    "rl.learner.packed_attention": "rl.models.packed_attention",
    "rl.learner.packing": "rl.models.packing",
    "rl.learner.page_lock": "rl.weights.host.page_lock",
    "rl.learner.policy": "rl.models.policy",
    "rl.learner.shared_prompts": "rl.models.layout",
    "rl.weights.frames": "rl.weights.host.frames",
    "rl.weights.frames_reader": "rl.weights.host.frames_receiver",
    "rl.weights.layout": "rl.weights.host.layout",
    "rl.weights.shm": "rl.weights.host.shm",
    "rl.weights.shm_file": "rl.weights.host.shm_file",
    "rl.weights.slots": "rl.weights.host.slots",
    "rl.weights.transport": "rl.weights.channel",
    "rl.weights.wire": "rl.weights.host.wire",
    "rollout.broker.ages": "rollout.broker.group_state",
    "rollout.broker.copies": "rollout.broker.core",
    "rollout.broker.duration": "rollout.broker.group_state",
    "rollout.broker.ending": "rollout.broker.evaluation",
    "rollout.broker.first_episodes": "rollout.broker.group_state",
    "rollout.broker.hello": "rollout.broker.core",
    "rollout.broker.journal": "rollout.broker.history",
    "rollout.broker.memory": "rollout.broker.process",
    "rollout.broker.outliers": "rollout.broker.guards",
    "rollout.broker.patience": "rollout.broker.deadlines",
    "rollout.broker.policies.barrier": "rollout.broker.built_in_hooks",
    "rollout.broker.policies.curricula": "rollout.broker.tasks",
    "rollout.broker.policies.filtering": "rollout.broker.built_in_hooks",
    "rollout.broker.policies.hedging": "rollout.broker.built_in_hooks",
    "rollout.broker.policies.priorities": "rollout.broker.tasks",
    "rollout.broker.policies.quarantine": "rollout.broker.built_in_hooks",
    "rollout.broker.policy": "rollout.broker.hooks",
    "rollout.broker.reorder": "rollout.broker.intake",
    "rollout.broker.task_guards": "rollout.broker.guards",
    "rollout.broker.traced_ledger": "rollout.broker.ledger",
    "rollout.generator.engines.vllm_thread": "rollout.generator.engines.cpu.vllm_thread",
}
"""Old name to new one."""


_EMPTIED = {"rl.core", "rollout.broker.policies"}
"""Packages that are gone: found empty, so that the module that is looked for in them is the one that is named."""


class _Moved(MetaPathFinder):
    """A finder of modules that is asked last, and so only for what no folder has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _EMPTIED:
            return ModuleSpec(fullname, None, is_package=True)
        if fullname in MOVED:
            raise ImportError(f"{fullname} is now {MOVED[fullname]} (all that moved: CHANGELOG.md)", name=fullname)
        return None


def name_what_moved() -> None:
    """Name what moved from now on, in this process."""
    sys.meta_path.append(_Moved())
