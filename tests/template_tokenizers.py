"""Tokenizers with the chat templates of real models, and with others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As the tokenizers of these models do, newlines that follow each other become one token.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REWRITING = (  # as some do, the last question gets a note, which moves when another one comes
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}NOTE {% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL, show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(["user\n\n\nassistant\n\nsystem\n\n <think>\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=template,
    )  # fmt: skip


def real(name: str) -> PreTrainedTokenizerFast:
    return tokenizer_with((TEMPLATES / f"{name}.jinja").read_text())
