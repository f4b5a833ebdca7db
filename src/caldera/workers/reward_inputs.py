"""What a reward model reads of each answer: the actor's own tokens, or a conversation anew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from caldera.config.reward import RewardModelConfig
from caldera.data import hf_tokenizer
from caldera.data.chat import Message
from caldera.data.judged_conversation import (
    conversation_tokens,
    require_own_template,
    reward_model_tokenizer,
)
from caldera.engine import Engine, ForwardPlan
from caldera.errors import DataError
from caldera.protocol import DataProto, tensors_of

TokenLists = list[list[int]]


class RewardInputs:
    """Makes the tokens of each row of a batch."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._max_length = config.max_length
        self._tokenizers = _tokenizers(config)

    def tokens(self, data: DataProto) -> TokenLists:
        """Of every row, without padding."""
        if self._tokenizers is None:
            tensors = tensors_of(data)
            rows = zip(tensors["input_ids"], tensors["attention_mask"].bool(), strict=True)
            return [ids[mask][: self._max_length].tolist() for ids, mask in rows]
        actors, own = self._tokenizers
        messages, answers = _prompts(data, actors), _answers(data, actors)
        return [
            conversation_tokens(own, asked, answer, self._max_length)
            for asked, answer in zip(messages, answers, strict=True)
        ]


def score_tokens(engine: Engine, tokens: TokenLists, plan: ForwardPlan) -> Tensor:
    """The model's verdict of each sequence, (B,)."""
    ids = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)  # (B, L)
    lengths = torch.tensor([len(row) for row in tokens])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()  # (B, L)
    # The engine looks for the last token among those of the response: here, among all.
    rows = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "responses": ids})
    return engine.infer(rows, plan)["scores"].sum(1)


def at_last_tokens(scores: Tensor, data: DataProto) -> Tensor:
    """Each answer's score (B,) at its last token, 0 elsewhere: (B, R).

    An answer without tokens has no last one, and a score of 0.
    """
    tensors = tensors_of(data)
    width = tensors["responses"].shape[1]
    last = tensors["attention_mask"][:, -width:].sum(1, keepdim=True) - 1  # (B, 1)
    return torch.where(torch.arange(width) == last, scores[:, None], 0.0)


def _tokenizers(
    config: RewardModelConfig,
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
    """The actor's and the reward model's; None where the actor's tokens will do."""
    model = config.model
    if model.input_tokenizer in (None, model.path):
        return None
    actors = hf_tokenizer(
        str(model.input_tokenizer),
        trust_remote_code=model.trust_remote_code,
        key="reward_model.model.input_tokenizer",
    )
    try:
        own = reward_model_tokenizer(model)
        if own.chat_template == actors.chat_template and own.get_vocab() == actors.get_vocab():
            return None
        require_own_template(own)
    except DataError as error:
        raise DataError(
            f"{error}\nThe conversations that the reward model reads are rendered by its own "
            "tokenizer; with reward_model.model.input_tokenizer=null it reads the actor's tokens"
        ) from error
    return actors, own


def _prompts(data: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[list[Message]]:
    """The messages of each row; where a run does not keep them, its prompt as one message."""
    if "raw_prompt" in data.non_tensor_batch:
        return [list(messages) for messages in data.non_tensor_batch["raw_prompt"]]
    tensors = tensors_of(data)
    width = tensors["input_ids"].shape[1] - tensors["responses"].shape[1]
    ids, mask = tensors["input_ids"][:, :width], tensors["attention_mask"][:, :width].bool()
    texts = [_decode(tokenizer, ids[row][mask[row]]) for row in range(len(data))]
    return [[{"role": "user", "content": text}] for text in texts]


def _answers(data: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    tensors = tensors_of(data)
    responses = tensors["responses"]  # (B, R)
    mask = tensors["attention_mask"][:, -responses.shape[1] :].bool()
    return [_decode(tokenizer, responses[row][mask[row]]) for row in range(len(data))]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
