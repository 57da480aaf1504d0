"""What PyTorch's tests and libraries reach in torch's class.

Here: its private names (``names``, ``shown``), its log (``logging_data``), delayed parameters (``delayed_params``),
mixed precision (``mixed_precision``), DTensors (``tensor_parallel``), and when each of them has its turn
(``observer``). Not here: the averaging itself.
"""
