"""What ``test_harness`` runs in a zygote: tests that pass, fail, skip, hang and die, with a child each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import unittest
from pathlib import Path


class Sample(unittest.TestCase):
    def setUp(self) -> None:
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        self.child.start()
        Path(os.environ["SAMPLE_PIDS"]).open("a").write(f"{self.child.pid}\n")

    def test_dies(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_exits(self) -> None:
        sys.exit(3)

    def test_fails(self) -> None:
        print("what it printed")
        assert 1 == 2

    def test_hangs(self) -> None:
        time.sleep(600)

    def test_passes(self) -> None:
        self.child.kill()
        self.child.join()

    def test_skips(self) -> None:
        self.skipTest("no such thing here")
