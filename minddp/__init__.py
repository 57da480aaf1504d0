"""minddp: DistributedDataParallel for PyTorch, from scratch."""
