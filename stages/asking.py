"""Asking an engine until its reply can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from headwater.core.errors import BadOutput
from headwater.core.seeds import derive_seed
from headwater.llm.http_replies import RefusedError
from headwater.llm.types import ChatRequest, Completion
from headwater.stages.base import Call

_Read = TypeVar("_Read")
_REFUSES_THE_REQUEST = {400, 413, 422}
"""Unlike 401 or 402, these may be about one request alone."""


async def ask(
    call: Call, request: ChatRequest, read: Callable[[ChatRequest, Completion], _Read], *, attempts: int
) -> _Read:
    """What `read` makes of the reply to `request`; it raises `BadOutput` for one that is of no use.

    Such a request is sent again, `attempts` times in all: each time with another seed, and after a reply that was cut
    with twice the room. The last `BadOutput` is raised; a server that refuses so much room costs this reply alone.
    """
    cut: BadOutput | None = None
    for attempt in range(1, attempts + 1):
        try:
            return read(request, await call.chat(request))
        except BadOutput as error:
            if attempt == attempts:
                raise
            sampling = request.sampling
            if error.reason == "cut_at_length":
                cut, sampling = error, sampling.model_copy(update={"max_tokens": 2 * sampling.max_tokens})
            request = replace(request, sampling=sampling, seed=derive_seed(request.seed, "again", attempt))
        except RefusedError as error:
            if cut is None or error.status not in _REFUSES_THE_REQUEST:
                raise
            raise cut from None  # so much room is refused: the row is lost, and not the run
    raise ValueError(f"attempts is {attempts}")
