"""The optimum for what was measured: times of a step (``backward_profile``), what an all-reduce costs
(``collective_cost``), and the buckets that ``minddp.planner.optimal_plan`` gives for both, tried (``planned``)."""

from collections.abc import Hashable, Sequence

from minddp.buckets import assign_buckets


def capped(nbytes: Sequence[int], caps: Sequence[int], kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Buckets of gradients in ready order, closed once they hold a cap's bytes; the last of ``caps`` repeats."""
    return assign_buckets(nbytes, kinds or [None] * len(nbytes), range(len(nbytes)), [*caps, caps[-1]])
