"""The one check of a request before a generator sees it.

vLLM has no tokenizer here, and without one it looks up whatever ids it is given. One that the model has not ends the
engine, and the request is then sent to the next one. So may a number that its own messages cannot carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rl.wire.messages import Generate, ProtocolError

MOST = 1 << 31
"""Of tokens and ids."""
SIGNED = 1 << 63
"""Seeds and priorities are below it."""


def check_request(request: Generate, vocabulary: int) -> None:
    """Raises ProtocolError for what no environment server would ask. vocabulary: ids are below this number."""
    wrong = next(_faults(request, vocabulary), "")
    if wrong:
        raise ProtocolError(f"Generate of {wrong}")


def _faults(request: Generate, vocabulary: int) -> Iterator[str]:
    """Each check may rely on those before it. Comparisons are written so that NaN is refused."""
    ids = request.prompt_ids
    if ids.ndim != 1 or ids.dtype != np.int32:
        yield f"{ids.dtype}{ids.shape} prompt ids"
    if not 0 <= request.known <= ids.size or not 1 <= request.max_tokens <= MOST:
        yield f"{ids.size} prompt ids, {request.known} of them known, and at most {request.max_tokens} tokens"

    own = ids.view(np.uint32)  # a negative one is a large one
    if ids.size and own.max() >= vocabulary:
        yield f"the prompt id {ids[own.argmax()]}: the vocabulary has {vocabulary} ids"
    if not all(0 <= each < MOST for each in request.stop_token_ids):
        yield f"stop_token_ids {request.stop_token_ids}"

    if not 0 <= request.temperature < math.inf or not 0 < request.top_p <= 1:
        yield f"temperature {request.temperature} and top_p {request.top_p}"
    if not 0 <= (request.seed or 0) < SIGNED or not -SIGNED < request.priority < SIGNED:
        yield f"seed {request.seed} and priority {request.priority}"
