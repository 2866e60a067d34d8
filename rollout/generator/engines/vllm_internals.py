"""Everything of vLLM that we use and that it does not promise to keep, in one place; written for vllm 0.32.

What is for CPUs alone stands in `cpu/`.

`tests/rollout/generator/test_vllm_engine.py` and `test_vllm_process.py` try each of these on the installed package, so
that another version fails there, with a name, and not in a run.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from transformers import TokenizersBackend
from vllm.v1.engine.async_llm import AsyncLLM


def engine_processes(llm: AsyncLLM) -> list[BaseProcess]:
    """The processes in which vLLM runs its engine core; with tensor parallelism the workers are their children."""
    client: Any = llm.engine_core
    processes: list[BaseProcess] = client.resources.engine_manager.processes
    return processes


def text_reader(tokenizer: Path) -> Any:
    """What vLLM's output processor reads texts with, from `tokenizer.json`."""
    return TokenizersBackend(tokenizer_file=str(tokenizer))
