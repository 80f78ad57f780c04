"""What a valid body asks for, as jobs: prompts to ids, parameters to ``Decoding``, limits checked.

Decides defaults, what fits, and refuses what never will, before anything is placed. Types and
ranges were checked before (``schemas``); how a job runs is the driver's business.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from sangam_core.decoding import Decoding, EosRule
from sangam_core.errors import InvalidRequest
from sangam_core.geometry import Geometry
from sangam_core.model_config import ModelTokens
from sangam_core.rules import check_decoding, decodes_in_blocks, keeps_kv
from sangam_router.fleet import FleetLimits
from sangam_router.job import Job
from sangam_router.public_api.schemas import GenerationBody, read_stops
from sangam_router.public_api.unmasking import check_filters, wanted_unmasking

_SEED_MASK = 2**63 - 1


class KnowsFleet(Protocol):
    """What is asked of the fleet view (``fleet.FleetView``)."""

    @property
    def has_colocated(self) -> bool:
        """Whether a request without KV (cache ``none``) has anywhere to run."""
        ...

    def limits(self) -> FleetLimits | None:
        """What fits into the fleet now; ``None`` while it is not ready."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The settings that bound a request (see ``RouterSettings``)."""

    default_max_tokens: int
    block_length: int
    max_fan_out: int
    fixed_mask_buffer_tokens: int | None = None


class Wishes:
    """Turns bodies into jobs.

    Args:
        fleet: the workers as of now.
    """

    def __init__(self, model: ModelTokens, limits: ServiceLimits, fleet: KnowsFleet) -> None:
        self._model = model
        self._limits = limits
        self._fleet = fleet

    def jobs(
        self,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        *,
        max_completion_tokens: int | None,
        request_id: str,
        arrival_seconds: float,
        param: str,
    ) -> list[Job]:
        """One job for each prompt and choice, in the order of their indices.

        Args:
            prompts: token ids. param: the field they came from, for errors.

        Raises:
            InvalidRequest: the request can never run as it is.
        """
        num_choices = body.n or 1
        self.check_fan_out(len(prompts), num_choices)
        max_tokens = _max_tokens(body.max_tokens, max_completion_tokens)
        stops = read_stops(body.stop)
        decoding = self._decoding(body)
        seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
        jobs: list[Job] = []
        for number, prompt in enumerate(prompts):
            where = param if len(prompts) == 1 else f"{param}.{number}"
            self._check_prompt(prompt, where)
            wanted, geometry = self._fit(len(prompt), max_tokens, decoding, where)
            for choice in range(num_choices):
                index = len(jobs)
                jobs.append(
                    Job(
                        request_id=f"{request_id}-{index}",
                        prompt_ids=tuple(prompt),
                        geometry=geometry,
                        decoding=decoding.model_copy(update={"seed": _choice_seed(seed, choice)}),
                        max_tokens=wanted,
                        arrival_seconds=arrival_seconds,
                        stops=stops,
                    )
                )
        return jobs

    def check_fan_out(self, num_prompts: int, num_choices: int) -> None:
        """Refuse more answers in one request than the limit."""
        limit = self._limits.max_fan_out
        if num_prompts * num_choices > limit:
            raise InvalidRequest(
                f"prompts x n is {num_prompts * num_choices} answers in one request, "
                f"of at most {limit}",
                param="n" if num_choices > 1 else "prompt",
                code="too_many_choices",
            )

    def max_sequence_tokens(self) -> int:
        """Limit on prompt + L, by the model and by the fleet; without KV it may be higher."""
        own, fleet = self._model.max_sequence_tokens, self._fleet.limits()
        return own if fleet is None else min(own, fleet.max_sequence_tokens)

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        if not prompt:
            raise InvalidRequest(f"{param} must not be empty", param=param, code="invalid_value")
        if min(prompt) < 0 or max(prompt) >= self._model.vocab_size:
            raise InvalidRequest(
                f"{param}: token ids must be in 0..{self._model.vocab_size - 1}",
                param=param,
                code="invalid_value",
            )
        if self._model.mask_id in prompt:
            raise InvalidRequest(
                f"{param} holds the mask token (id {self._model.mask_id}), as only answers may",
                param=param,
                code="mask_in_prompt",
            )

    def _fit(
        self, num_prompt: int, max_tokens: int | None, decoding: Decoding, param: str
    ) -> tuple[int, Geometry]:
        """The answer's length in tokens and its geometry; an unstated length gives way."""
        block = self._limits.block_length
        room = self._room_tokens(decoding)
        fixed = self._limits.fixed_mask_buffer_tokens
        buffer = fixed or -(-(max_tokens or self._limits.default_max_tokens) // block) * block
        if max_tokens is None and fixed is None:
            buffer = min(buffer, max(block, (room - num_prompt) // block * block))
        if num_prompt + buffer > room:
            least = fixed or block
            named = "max_tokens" if max_tokens and num_prompt + least <= room else param
            raise InvalidRequest(
                f"{named}: {num_prompt} prompt tokens and {buffer} for the answer (whole blocks "
                f"of {block}) exceed the {room} tokens that {self._bound_by(room)}; "
                + (
                    f"lower max_tokens to {(room - num_prompt) // block * block} or less"
                    if named == "max_tokens"
                    else f"shorten the prompt to {max(0, room - least)} tokens or less"
                ),
                param=named,
                code="context_length_exceeded",
            )
        if max_tokens is not None and max_tokens > buffer:
            raise InvalidRequest(
                f"max_tokens: {max_tokens} exceeds this server's mask buffer of {buffer} tokens",
                param="max_tokens",
                code="invalid_value",
            )
        wanted = min(max_tokens or self._limits.default_max_tokens, buffer)
        if not decodes_in_blocks(self._model.family, decoding.cache):
            block = buffer
        return wanted, Geometry(num_prompt, buffer // block, block)

    def _bound_by(self, room: int) -> str:
        own = self._model.max_sequence_tokens
        return "the model takes" if room >= own else f"this server's workers take (the model {own})"

    def _room_tokens(self, decoding: Decoding) -> int:
        """Tokens that prompt + L may have, by the model and by the fleet."""
        limits = self._fleet.limits()
        if limits is None or keeps_kv(decoding.cache):
            return self.max_sequence_tokens()
        if not self._fleet.has_colocated:
            raise InvalidRequest(
                "cache 'none' needs a colocated worker, and this server has none",
                param="cache",
                code="unsupported_value",
            )
        return min(self._model.max_sequence_tokens, limits.max_tokens_without_kv)

    def _decoding(self, body: GenerationBody) -> Decoding:
        cache = body.cache or "dual"
        decoding = Decoding(
            unmasking=wanted_unmasking(body.unmasking, body.confidence_threshold, cache),
            cache=cache,
            temperature=body.temperature or 0.0,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            eos_ids=self._model.eos_ids,
            eos_rule=EosRule.IGNORE if body.ignore_eos else EosRule.END,
        )
        check_decoding(self._model.family, decoding)
        check_filters(self._model.family, decoding, has_temperature=body.temperature is not None)
        return decoding


def _max_tokens(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    if max_tokens is None or max_completion_tokens in (None, max_tokens):
        return max_tokens or max_completion_tokens
    raise InvalidRequest(
        f"max_tokens ({max_tokens}) and max_completion_tokens ({max_completion_tokens}) mean the "
        "same and must not differ",
        param="max_completion_tokens",
        code="invalid_value",
    )


def _choice_seed(seed: int, choice: int) -> int:
    """The first choice has the client's seed itself; the others differ from it."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK
