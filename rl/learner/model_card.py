"""What stands beside the weights of a model that is given away: its card, and how it is sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rl.wire.run import RunFile

_CARD = """---
{head}---

# {name}

{how} with Fresco: {steps} steps of {batch}
{what} from {start}.

| what | value |
| --- | --- |
{facts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_NAME)
model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_NAME)
```

vLLM: `vllm serve FOLDER_OR_NAME`.
"""

_BY_RL = ("Trained by asynchronous reinforcement learning", "samples")


def texts_beside(run: RunFile, step: int) -> dict[str, str]:
    """Files by name; the start model's own way of sampling stays as it is."""
    assert run.model_folder is not None
    texts = {"README.md": _card(run, step)}
    if not (run.model_folder / "generation_config.json").exists():
        texts["generation_config.json"] = json.dumps(_sampling(run, run.model_folder), indent=2) + "\n"
    return texts


def _card(run: RunFile, step: int) -> str:
    config = run.config
    start = config.model.path
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["supervised-fine-tuning" if config.supervised else "reinforcement-learning", "fresco"]
    if "/" in start and not Path(start).exists():
        head["base_model"] = start
    elif start != "tiny":
        start = Path(start).name  # where it lay says nothing to others

    facts = {
        "environment": config.env.name,
        "training tasks": run.train_tasks,
        "loss": config.algo.loss,
        "group size": config.rollout.group_size,
        "alpha": f"{config.rollout.alpha:g}",
        "learning rate": f"{config.learner.lr:g}",
        "temperature": f"{config.sampling.temperature:g}",
        "longest response": f"{config.sampling.max_tokens} tokens",
    }

    if config.supervised:
        facts = {"rows": run.train_tasks, "learning rate": facts["learning rate"]}
    kind = ("Fine-tuned on conversations", "rows") if config.supervised else _BY_RL
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    told = {"name": config.name, "steps": step, "batch": config.batch_size, "start": f"`{start}`", "facts": rows}
    told |= {"how": kind[0], "what": kind[1]}
    return _CARD.format(head=yaml.safe_dump(head, sort_keys=False), **told)


def _sampling(run: RunFile, folder: Path) -> dict[str, Any]:
    """As the model was sampled in training, up to the end that its configuration names."""
    told = json.loads((folder / "config.json").read_text())
    ends = {name: told[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if told.get(name) is not None}
    return {"do_sample": True, "temperature": run.config.sampling.temperature} | ends
