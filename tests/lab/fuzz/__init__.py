"""Programs drawn at random, each run with torch's DistributedDataParallel and with ours.

Reading order: ``program`` (what a program is, and its listing), ``nets`` (the models), ``interpreter`` (runs one on a
rank), ``ranks`` (processes that run many), ``compare`` (the verdict), ``strategies`` (draws programs),
``hunt`` (draws, runs, judges and shrinks many), ``__main__`` (the command line).
"""
