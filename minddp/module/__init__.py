"""The module that users wrap theirs in, and what it does in forward.

Here: arguments and their checks (``config``), which parameters (``parameters``), what hangs on one reducer and is
remade with it (``engine``), communication hooks' registration, ``join``, mixed precision, delayed parameters, torch's
private names. May import from ``ranks``, ``guards``, ``reduction``, ``planner``,
``timeline`` and ``environment``.
Not here: anything that runs during backward (csrc), how gradients are grouped and scaled (``reduction``), checks that
watch over training (``guards``).
"""
