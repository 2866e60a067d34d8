"""Fixtures of the real engine, shared by its test files: a start costs seconds."""

from tests.rollout.generator.vllm_rig import rig, shared_rig, tied_rig  # noqa: F401
