"""A tokenizer for small models: frequent pieces of a corpus are single tokens, every other text falls back to bytes.

Pieces are words with their spaces, punctuation, LaTeX commands with their brace, and whole numbers up to three
digits. The vocabulary is the 256 bytes and every piece of the corpus, so any text is encoded, and decoding gives it
back exactly. There are no merges: `ignore_merges`, as in Llama 3, takes a piece that is in the vocabulary whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PADDING = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# A space goes with the word behind it, but in front of a number with the word before, so that a number is the same
# token everywhere; a newline goes with what it ends.
PIECE = r"\d{1,3}| ?\\[A-Za-z]+\{?| ?[A-Za-z]+(?: (?=\d)|\n)?| ?[^\sA-Za-z\d]+(?: (?=\d)|\n)?|\s+"

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SOURCES = (__file__, CHAT_TEMPLATE)
"""What a tokenizer is made of."""


def build_tokenizer(corpus: Iterable[str], piece: str = PIECE) -> Tokenizer:
    """A tokenizer whose vocabulary holds every piece of the corpus (and the roles of the chat template).

    `piece`: the regular expression of a piece; what it does not match stands alone, so no text is lost.
    """
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(piece), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = {part for text in corpus for part, _ in splitter.pre_tokenize_str(text)}
    for role in ("system", "user", "assistant"):
        pieces |= {part for part, _ in splitter.pre_tokenize_str(f"{role}\n")}

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *sorted(pieces - set(alphabet))])}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (PADDING, TURN_START, TURN_END)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja as transformers and vLLM read them."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PADDING,
        model_max_length=longest,
        chat_template=CHAT_TEMPLATE.read_text().strip(),
    ).save_pretrained(folder)
