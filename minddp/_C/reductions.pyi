"""The reductions' case; csrc/reductions."""

from . import Case

class EarlierSums(Case):
    def __init__(self) -> None: ...
