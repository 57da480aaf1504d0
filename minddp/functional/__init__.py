"""Collectives inside the autograd graph, with exact gradients of every order.

What is differentiated
    N processes run N programs, each with a loss of its own; what their ``backward()`` calls compute
    together is the gradient of the *sum* of these losses, as one process that ran all N programs would
    compute it. That is ``loss="per_rank"``, the default. (Average such gradients, as DDP does, and you
    have the gradient of the mean of the losses.) Where instead all ranks go on from a collective's result
    to compute one and the same loss, ``loss="replicated"`` counts it once: no division by the world size
    is left to remember, and backward moves nothing. Where the ranks do not compute the same, it raises.

What always holds
    * Inputs are never modified; results are new, contiguous tensors.
    * Ranks are ranks in the group; ``global_src`` / ``global_dst`` name ranks of the default group instead.
    * Every dtype that c10d or torch can move is moved, complex, half and bool among them; reductions say
      what they cannot reduce. Non-contiguous, 0-dimensional and empty tensors are inputs like others.
    * If a tensor requires grad on one rank, the result requires grad on every rank, and backward is itself
      a collective: every rank must reach it, if only with ``(y * 0).sum().backward()``. Likewise with
      ``create_graph=True`` for second derivatives: use ``create_graph`` on all ranks or on none.
    * Calls that do not fit together raise :class:`CollectiveError` on every rank; ``agreement.py`` says how,
      what it costs (a maximum of four integers a call) and how to leave it out (``MINDDP_CHECK_COLLECTIVES=0``).
    * Under torch.compile a call is a graph break: it runs, eagerly; ``fullgraph=True`` refuses it.
      ``torch.func`` transforms (grad, vmap, jvp) and forward-mode tangents raise, on every rank.

Reading order: ``linear.py`` (the derivation), ``collectives.py``, ``agreement.py``, ``control.py``, ``transport.py``.
"""

from .agreement import CollectiveError
from .collectives import all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter

__all__ = [
    "CollectiveError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
