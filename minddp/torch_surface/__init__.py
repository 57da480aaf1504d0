"""What PyTorch's tests and libraries reach in torch's class. Uses guards, timeline."""
