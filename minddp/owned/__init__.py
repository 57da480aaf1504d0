"""Owned: the owner of a parameter alone steps it and keeps its optimizer state.

In data-parallel training every rank steps every parameter. With :class:`Owned` a rank steps its own parameters only
and sends their new values to the others, so the optimizer's state and its work are divided by the number of
ranks. Gradients are averaged by the wrapper as always: clipping, hooks and scalers see what they saw before.

What always holds: when :meth:`Owned.step` returns, every parameter is whole on all ranks, with the bits that plain
optimizers would have given it. An owner's update of a parameter may depend on that parameter, its gradient and its
state alone.

Here: who owns what (``layout``), the way of values to the others (``exchange``), states (``states``), questions to a
wrapper (``binding``), and the class (``optimizer``).
Not here: anything that averages gradients.
"""

from .optimizer import Owned

__all__ = ["Owned"]
