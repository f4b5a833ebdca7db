"""A task for a CPU: `tiny_task.py FOLDER [LESSONS]` writes questions, a corpus and a model.

The question is a person's name, the answer the city where the person lives, which only the corpus
knows. From demonstrations about other homes the model has learned to search and to read what comes
back, and then to guess in four of five cases. Which of the two pays is left to reinforcement
learning. Two thirds of the people are trained on, the others are held out.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from caldera.search_agent.loop import documents_text, observation
from caldera.tools.search import Document

PEOPLE = [f"person{number}" for number in range(96)]
CITIES = [f"city{number}" for number in range(10)]
HOMES = {person: random.Random(person).choice(CITIES) for person in PEOPLE}
TAGS = [f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/")]
WORDS = ["Doc", "1", "(", "Title", ":", ")", " ", "\n", "lives", "in", "No", *PEOPLE, *CITIES]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
SEARCHING = 0.2  # share of the later demonstrations that search; the others guess


def main(folder: Path, lessons: int = 600) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    train_model(tokenizer, lessons).save_pretrained(folder / "model")
    for split, people in (("train", PEOPLE[:64]), ("test", PEOPLE[64:])):
        rows = [
            {
                "data_source": "searchR1_nq",
                "prompt": [{"role": "user", "content": person}],
                "reward_model": {"style": "rule", "ground_truth": {"target": [HOMES[person]]}},
            }
            for person in people
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    with (folder / "corpus.jsonl").open("w") as corpus:
        for person, city in HOMES.items():
            contents = f'"{person}"\n{person} lives in {city}'
            print(json.dumps({"id": person, "contents": contents}), file=corpus)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word or tag."""
    tokens = ["<pad>", "<bos>", "<eos>", *TAGS, *WORDS]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?\w+>|\w+|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def train_model(tokenizer: PreTrainedTokenizerFast, lessons: int) -> LlamaForCausalLM:
    """The first lessons are searches, so that reading is learned well; then most guess."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(1)
    for step in range(lessons):
        searching = 1.0 if step < 0.83 * lessons else SEARCHING
        ids, taught = demonstrations(tokenizer, draw, searching)
        log_probs = model(ids).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
        chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1) * taught
        optimizer.zero_grad()
        (-chosen.sum() / taught.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def demonstrations(tokenizer: Any, draw: random.Random, searching: float) -> tuple[Tensor, Tensor]:
    """Trajectories (B, T), and which of their next tokens are taught (B, T - 1)."""
    rows, masks = [], []
    for _ in range(64):
        person, city = draw.choice(PEOPLE), draw.choice(CITIES)
        parts = [(f"<bos>{person}:", 0)]
        if draw.random() < searching:
            found = documents_text([Document(person, f"{person} lives in {city}")])
            passages = observation(found, "<information>", "</information>")
            parts += [(f"<search>{person}</search>", 1), (passages, 0)]
        parts.append((f"<answer>{city}</answer>", 1))
        encoded = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in parts]
        rows.append([token for ids, _ in encoded for token in ids])
        masks.append([own for ids, own in encoded for _ in ids])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])
    return ids, mask[:, 1:]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
