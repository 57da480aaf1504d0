"""Where ``torch.compile`` splits a forward: as many graphs as buckets, so that these become complete one by one.

Dynamo's splitter reads one number of the wrapper, ``bucket_bytes_cap``. It walks the graph from its end, closes the
first graph at 1 MiB of parameters, and each other one at that cap.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..config import DEFAULT_LAST_BUCKET_BYTES as _FIRST  # torch's class's first: Dynamo asks for as much
from ..logs import log


def cap_of_graphs(averager: Any) -> int:
    """The cap, in bytes, by which a forward gets as many graphs as there are buckets, or nearly as many.

    One cap that the program has chosen stays, as with torch's class.
    """
    config, names = averager.config, averager.parameters.names
    if not (config.default_caps or config.lists_caps):
        return max(config.cap, _FIRST)
    buckets = averager.buckets_to_come()
    # A layer's parameters are used by one node of the graph.
    layers = groupby((i for bucket in buckets for i in bucket), lambda i: names[i].rpartition(".")[0])
    sizes = [sum(averager.nbytes[i] for i in layer) for _, layer in layers]
    low, high = _FIRST, max(sum(sizes), _FIRST)
    while low < high:  # the least cap that gives no more graphs than buckets
        middle = (low + high) // 2
        low, high = (low, middle) if _graphs(sizes, middle) <= len(buckets) else (middle + 1, high)
    natural = max(config.cap if averager.is_as_torch else config.caps_for(sum(sizes))[0], _FIRST)
    cap = min(natural, low, max(low - 1, _FIRST), key=lambda cap: abs(_graphs(sizes, cap) - len(buckets)))
    _say(len(buckets), _graphs(sizes, cap), config.auto_tune)
    return cap


def _graphs(sizes: list[int], cap: int) -> int:
    number, filled = 1, 0
    for size in sizes:
        if filled >= (cap if number > 1 else _FIRST):
            number, filled = number + 1, 0
        filled += size
    return number


def _say(buckets: int, graphs: int, auto: bool) -> None:
    if graphs != buckets:
        log.info("torch.compile splits forward into about %d graphs; gradients travel in %d buckets", graphs, buckets)
    if auto:
        log.info('bucket_cap_mb="auto" plans on a forward that torch.compile has split into about %d graphs', graphs)
