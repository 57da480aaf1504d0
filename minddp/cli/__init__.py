"""How programs come to minddp, and its commands. Uses planner, shm.

Here: :func:`minddp.install` (``install``), and the command ``minddp`` (``command``) with its parts: ``run``,
``tune``, ``doctor``. Not here: what the commands do, beyond arguments and printing.
"""
