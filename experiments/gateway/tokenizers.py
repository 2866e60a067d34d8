"""Small tokenizers, trained here, that hold the special tokens of a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "templates"
_SPECIAL = re.compile(
    r"<[|｜][^>{}' ]{1,40}[|｜]>|<start_of_turn>|<end_of_turn>|</?tool_call>|</?think>"
    r"|\[gMASK\]|<sop>"
)
_STOPS = {
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "gemma": ["<end_of_turn>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>", "<|end|>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "phi3": ["<|end|>"],
}
_CORPUS = (
    'the user asks and the assistant answers 0 1 2 3 4 5 6 7 8 9 system tool response {"name": "add", "arguments": '
    '{"a": 1, "b": 22}} \n\n think because sum result of file list error' * 3,
)


def template_names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def special_tokens(name: str) -> set[str]:
    """What the template `name` writes as single tokens, and what ends its turns."""
    return {"<|bos|>", *stop_tokens(name), *_SPECIAL.findall((TEMPLATES / f"{name}.jinja").read_text())}


def stop_tokens(name: str) -> list[str]:
    return _STOPS.get(name, ["<|im_end|>"])


def make_folder(name: str, folder: Path, special: Iterable[str] = ()) -> Path:
    """A model folder with the original template `name` and a tokenizer for it, which holds the tokens `special` too."""
    stops = stop_tokens(name)
    special = sorted({*special_tokens(name), *special})

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": stops[0], "bos_token": "<|bos|>"}))
    ids = [tokenizer.token_to_id(stop) for stop in stops]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size()}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
