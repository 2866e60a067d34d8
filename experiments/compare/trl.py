"""TRL's GRPOTrainer (https://huggingface.co/docs/trl/grpo_trainer), synchronous, in an environment of its own.

On a GPU vLLM generates, in the same process and on the same GPU ("colocate").

`python -m experiments.compare.trl JOB.json` trains. That part runs in TRL's environment, where nothing of Fresco is
installed but this folder and the judge of answers can be imported.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from envs.math.answers import last_box
from experiments.compare.job import Job, Row, has_ended, read_lines

PINS = "requirements/compare_trl.txt"
_ROWS = "rows.jsonl"
_SHARE = 0.3
"""vLLM's share of the GPU's memory, which is TRL's default."""
CACHE = 1 << 28
"""Bytes of the KV cache of both sides: TRL empties its own at each step, which takes time by its size."""


def command(job: Job, python: str) -> list[str]:
    path = job.folder.with_suffix(".json")
    job.save(path)
    return [python, "-m", "experiments.compare.trl", str(path)]


def rows(job: Job) -> list[Row]:
    return [Row(**line) for line in read_lines(job.folder / _ROWS)]


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 where the last box holds the answer, as Fresco's maths environment has it."""
    return [
        float(last_box(completion[-1]["content"]) == gold) for completion, gold in zip(completions, answer, strict=True)
    ]


def train(job: Job) -> None:
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    transformers: Any = import_module("transformers")
    job.folder.mkdir(parents=True)

    steps = job.steps * job.repeats
    asked = read_lines(job.questions)[: steps * job.groups]
    data = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": each["question"]}], "answer": each["answer"]} for each in asked]
    )
    batch = job.groups * job.group_size
    settings = trl.GRPOConfig(
        output_dir=str(job.folder / "trl"),
        per_device_train_batch_size=job.rows_at_once,
        gradient_accumulation_steps=batch // job.rows_at_once,
        num_generations=job.group_size,
        max_completion_length=job.max_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        max_steps=steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        seed=job.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **_on_device(job),
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype="float32"),
        processing_class=transformers.AutoTokenizer.from_pretrained(job.model),
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
    )

    clock = _clock_generation(trainer)
    trainer.add_callback(_report_to(job, clock, transformers.TrainerCallback)())
    trainer.train()


def _on_device(job: Job) -> dict[str, Any]:
    """The configuration's fields of a device. Weights are float32 everywhere; on a GPU the forward runs in bfloat16."""
    if job.device == "cpu":
        return {"bf16": False, "use_cpu": True}

    module: Any = import_module("trl.generation.vllm_generation")
    # TRL says neither, and vLLM's guess is another dtype for float32, and all of its share.
    module.LLM = partial(module.LLM, dtype="bfloat16", kv_cache_memory_bytes=CACHE)
    vllm = {"mode": "colocate", "gpu_memory_utilization": _SHARE, "max_model_length": job.longest}
    return {"bf16": True, "use_vllm": True} | {f"vllm_{name}": value for name, value in vllm.items()}


def _clock_generation(trainer: Any) -> dict[str, float]:
    """The seconds spent on samples and their rewards so far. That method is TRL's own: the pins keep it as it is."""
    clock = {"generate": 0.0}
    generate = trainer._generate_and_score_completions

    def clocked(inputs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return generate(inputs)
        finally:
            clock["generate"] += time.perf_counter() - begin

    trainer._generate_and_score_completions = clocked
    return clock


def _report_to(job: Job, clock: dict[str, float], base: Any) -> Any:
    """A callback that writes a row for each step, and at the end of a repeat takes the model back to its start."""

    class Report(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.begin = time.perf_counter()
            self.generated = 0.0
            self.rows: list[Row] = []
            self.repeat = 0

        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            self.start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()
            self.generated = clock["generate"]

        def on_log(
            self, _args: Any, _state: Any, control: Any, logs: dict[str, Any], model: Any, optimizer: Any, **_: Any
        ) -> None:
            if "reward" not in logs:
                return

            generate = clock["generate"] - self.generated
            parts = {"generate": generate, "train": time.perf_counter() - self.begin - generate}
            tokens = round(logs["completions/mean_length"] * job.groups * job.group_size)
            self.rows.append(Row(time.time(), float(logs["reward"]), tokens, parts, self.repeat))
            with (job.folder / _ROWS).open("a") as file:
                file.write(json.dumps(asdict(self.rows[-1])) + "\n")

            if has_ended(job, self.rows):
                self.repeat += 1
                self.rows = []
                control.should_training_stop = self.repeat >= job.repeats
                model.load_state_dict(self.start)
                optimizer.state.clear()

    return Report


if __name__ == "__main__":
    train(Job.load(Path(sys.argv[1])))
