"""PyTorch's own DistributedDataParallel tests, run against minddp.

The tests ship inside the torch wheel (``torch.testing._internal.distributed``); nothing is copied
from there. ``python -m tests.conformance --impl minddp`` swaps minddp's class in and runs every test
that passes with torch's class on this kind of machine, which is what ``torch_passes.txt`` lists and
``--impl torch`` checks (``--discover`` makes the list anew).

    zygote        what a server has imported, torch and the tests, which forks once for each test
    cpu_for_cuda  names rebound so that tests gated on GPUs run on the CPU with Gloo
    cases         which tests there are, their themes, the lists kept in this folder
    __main__      the command line: runs, counts, prints the table
    transport     another: PyTorch's tests of process groups, with shared memory in Gloo's place

What always holds: every test has a process group and a timeout of its own; a test that hangs or
crashes fails alone, and its ranks are killed as one process group.
"""
