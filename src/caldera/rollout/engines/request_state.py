"""The state of a request: the engine that has it, and its tokens so far."""

from __future__ import annotations

from itertools import groupby

from caldera.errors import RolloutError
from caldera.rollout.base import (
    Completion,
    Decode,
    FinishReason,
    OnFinished,
    OnToken,
    Request,
    completes_a_stop,
)
from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.seeds import derive_seed

NOWHERE = -1
ENDS: dict[str | None, FinishReason | None] = {None: None, "stop": "stop", "length": "length"}
"""An engine's finish reasons: of a request that goes on, or has ended well."""


class RequestState:
    """Goes on in another engine, or with other weights, from the tokens that it has."""

    def __init__(
        self,
        number: int,
        request: Request,
        on_token: OnToken | None,
        on_finished: OnFinished | None,
    ) -> None:
        self.number = number
        self.request = request
        self.on_token = on_token
        self.on_finished = on_finished
        self.replica = self.engine_number = NOWHERE
        self._forget()

    def _forget(self) -> None:
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[list[tuple[int, float]]] = []
        self.prompt_log_probs: list[float] | None = None
        self._versions: list[int] = []  # of each token

    @property
    def lacks_prompt_log_probs(self) -> bool:
        return self.request.params.prompt_logprobs and self.prompt_log_probs is None

    @property
    def seed(self) -> int:
        """Of the tokens that are still to come: the seeds of earlier ones are used."""
        seed, known = self.request.seed, len(self.token_ids)
        return derive_seed(seed, "on", known) if known else seed

    def assign(self, replica: int, engine_number: int) -> None:
        """An engine has it, under the engine's number."""
        self.replica, self.engine_number = replica, engine_number

    def requeue(self) -> None:
        """No engine has it. Its tokens become part of the prompt when it continues, which changes
        nothing but penalties that count sampled tokens: with those it starts again."""
        params = self.request.params
        self.replica = self.engine_number = NOWHERE
        if not self.token_ids or not (params.presence_penalty or params.frequency_penalty):
            return
        if self.on_token is not None:
            raise RolloutError(
                "a request with presence_penalty or frequency_penalty was interrupted after its "
                "first tokens were streamed: it cannot continue"
            )
        self._forget()

    def take(self, event: Event, decode: Decode | None) -> FinishReason | None:
        """Add tokens; returns why the request ends, if it does."""
        params = self.request.params
        if event.prompt_log_probs is not None and self.lacks_prompt_log_probs:
            # it may have gone on, with sampled tokens behind the prompt
            self.prompt_log_probs = event.prompt_log_probs[: len(self.request.prompt_ids) - 1]
        for place, (token, log_prob) in enumerate(
            zip(event.token_ids, event.log_probs, strict=True)
        ):
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            if params.logprobs:
                # lists, if they came as a message
                ranked = event.top_log_probs[place][: params.logprobs]
                self.top_log_probs.append([(token, value) for token, value in ranked])
            self._versions.append(event.version)
            if self.on_token is not None:
                self.on_token(self.number, token, log_prob)
            if params.stop and decode and completes_a_stop(self.token_ids, params.stop, decode):
                return "stop"
        return ENDS[event.finish_reason]

    def completion(self, reason: FinishReason, version: int) -> Completion:
        """The tokens by now; `version` counts if there are none."""
        params = self.request.params
        runs = tuple((number, len(list(run))) for number, run in groupby(self._versions))
        first = runs[0][0] if runs else version
        return Completion(
            self.token_ids,
            self.log_probs,
            reason,
            first,
            runs,
            self.top_log_probs if params.logprobs else None,
            self.prompt_log_probs,
        )
