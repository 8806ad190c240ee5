"""Conversations that are too long, without their oldest turns: whole ones, so that a question goes
with its answers and tool results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.transforms.chat.render import ChatTemplate, Refused, Rendered
from easypipe.transforms.tokenizer.lengths import TOO_LONG, Lengths
from easypipe.transforms.tokenizer.masked import encode_masked


def trimmed(
    template: ChatTemplate,
    requests: Sequence[Mapping[str, Any]],
    answers: Sequence[Rendered | Refused],
    lengths: Lengths,
) -> list[Rendered | Refused]:
    """The answers, those that are too long rendered anew with as few turns left out as possible;
    the system prompt and the last turn of the assistant stay, with the question before it.
    `Rendered.lost` is how many tokens went. Refused where that is still too long.
    """
    assert lengths.limit is not None
    result = list(answers)
    sizes = _sizes(result, lengths)
    over = np.flatnonzero(sizes > lengths.limit).tolist()
    starts = {i: _starts(requests[i]["messages"]) for i in over}
    # how many turns go: more than low; high is known to be enough
    low, high = dict.fromkeys(over, 0), {i: len(starts[i]) for i in over}
    best: dict[int, Rendered] = {}
    asked = {i: high[i] for i in over if high[i]}  # first whether it can be enough at all
    while asked:
        fewer = [
            {**requests[i], "messages": _without(requests[i]["messages"], starts[i][count - 1])}
            for i, count in asked.items()
        ]
        made = template.render(fewer)
        for (i, count), one, size in zip(asked.items(), made, _sizes(made, lengths), strict=True):
            if isinstance(one, Rendered) and size <= lengths.limit:
                best[i], high[i] = one._replace(lost=int(sizes[i] - size)), count
            else:
                low[i] = count
        asked = {i: (low[i] + high[i]) // 2 for i in asked if i in best and high[i] - low[i] > 1}
    for i in over:
        detail = f"{sizes[i]} tokens; its system prompt and last turn alone are more than max_length {lengths.limit}"
        result[i] = best.get(i) or Refused(TOO_LONG, detail)
    return result


def _starts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where conversations that have lost 1, 2, ... turns begin: at questions, the last one that
    before the assistant's last turn.
    """
    first = int(messages[0]["role"] == "system")
    answer = max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1
    )
    return [i for i in range(first + 1, answer) if messages[i]["role"] == "user"]


def _without(messages: Sequence[Mapping[str, Any]], start: int) -> list[Mapping[str, Any]]:
    return [
        *(message for message in messages[:1] if message["role"] == "system"),
        *messages[start:],
    ]


def _sizes(answers: Sequence[Rendered | Refused], lengths: Lengths) -> NDArray[np.int64]:
    """Int64[n] tokens of each, with the EOS that ends it; 0 of those that are none."""
    good = [(i, one) for i, one in enumerate(answers) if isinstance(one, Rendered)]
    texts = pa.array([one.text for _, one in good], pa.large_string())
    made = encode_masked(
        lengths.tokenizer,
        texts,
        [one.spans for _, one in good],
        [one.end for _, one in good],
        raw=False,
        whole=True,
    )
    sizes = np.zeros(len(answers), np.int64)
    sizes[[i for i, _ in good]] = np.diff(made.offsets)
    return sizes
