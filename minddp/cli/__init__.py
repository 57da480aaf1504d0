"""How programs come to minddp: in the place of torch's class, and by commands.

Here: :func:`minddp.install` (``install``), and the command ``minddp`` (``command``) with its parts: ``run``,
``tune``, ``doctor``. A file imports the core and the companions that its first line names; no other room imports this
one. Not here: what the commands do, beyond arguments and printing.
"""
