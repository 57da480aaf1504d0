"""How programs come to minddp: in the place of torch's class, and by commands.

Here: :func:`minddp.install` (``install``), and the command ``minddp`` (``command``) with its parts: ``run``,
``tune``, ``doctor``. May import from every other room; none imports this one. Not here: what
the commands do, beyond arguments and printing.
"""
