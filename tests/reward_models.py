"""A reward model with a tokenizer and a chat template of its own, and what transformers says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEXTS = [
    "What is the sum of three and four? The sum is seven.",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz",
    "Write a poem about the sea, please. The sea is wide and grey.",
]

Messages = list[dict[str, str]]


def save_reward_model(folder: Path) -> Path:
    """A tiny classifier with a byte-level tokenizer, which puts <s> before whatever it reads."""
    return _save(folder, AutoModelForSequenceClassification)


def save_judge(folder: Path) -> Path:
    """A tiny language model with the same tokenizer."""
    return _save(folder, AutoModelForCausalLM)


def _save(folder: Path, kind: Any) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(11)
        kind.from_config(config).save_pretrained(folder)
    return folder


def plain_scores(
    folder: Path, conversations: list[Messages], max_length: int | None = None
) -> list[float]:
    """The scores of whole conversations by transformers alone, one by one and without padding."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = []
    for conversation in conversations:
        ids = tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:max_length]])).logits  # (1, 1)
        scores.append(float(logits[0, 0]))
    return scores
