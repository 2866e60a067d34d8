"""A model folder with a small byte-level tokenizer, trained here, and a chat template in the style of Qwen."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = ("the user asks and the assistant answers 0 1 2 3 4 5 6 7 8 9 \\boxed{42} system tool response " * 3,)

# Qwen3's structure: default-free system prompt, tool messages as a user's, reasoning dropped from past turns.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if loop.last %}
            {%- set content = '<think>\\n\\n</think>\\n\\n' + content %}
        {%- elif '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role in ["system", "user"] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_model_folder(folder: Path, *, template: str = TEMPLATE, eos: str = "<|im_end|>") -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))

    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": eos,
                "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
            }
        )
    )

    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id(eos), tokenizer.token_to_id("<|endoftext|>")]})
    )
    return folder
