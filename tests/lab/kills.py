"""Kills ranks at random instants of training under torchrun's restarts; every run must end with the weights of the
unbroken one.

The program saves a checkpoint every few steps (to a new file, then renamed: a rank killed while it writes leaves the
old one), and begins where the last one ended. One run is killed once or twice, while it trains, saves or ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 60, 5
LONGEST = 180  # seconds for one run, restarts included


def train(folder: Path) -> None:
    """One rank, from the last checkpoint on; rank 0 leaves the weights in ``folder`` at the end."""
    import torch
    import torch.distributed as dist

    import minddp

    faulthandler.dump_traceback_later(LONGEST / 3)  # a rank that is stuck shows where
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}-{os.getpid()}").touch()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    ddp = minddp.DistributedDataParallel(net, bucket_cap_mb_list=[0.001] * 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step, saved = 0, folder / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < STEPS:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        step += 1
        time.sleep(0.02)
        if step % EVERY == 0 and rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
    if rank == 0:
        torch.save(net.state_dict(), folder / "end.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, kills: int, draw: random.Random) -> tuple[int, int]:
    """Runs the program with ``kills`` of its ranks killed; how many were, and torchrun's exit status."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3",
        "--monitor-interval", "0.1", "-m", "tests.lab.kills", "--train", str(folder),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT),
        # Else the restarted ranks get the store of those before, and Gloo connects to addresses of dead ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    with (folder / "output.txt").open("w") as output:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    done, seen, deadline = 0, set[Path](), time.monotonic() + LONGEST
    try:
        while launcher.poll() is None and time.monotonic() < deadline:
            fresh = set(folder.glob("pid-*")) - seen
            if done < kills and len(fresh) == 2:  # both ranks of one attempt
                seen |= fresh
                time.sleep(draw.uniform(0.0, STEPS * 0.03))
                victim = draw.choice(sorted(fresh))
                done += _kill(int(victim.name.rpartition("-")[2]))
            time.sleep(0.02)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(30)
    return done, launcher.returncode


def _kill(pid: int) -> int:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended already
        return 0
    return 1


def same_weights(one: Path, other: Path) -> bool:
    import torch

    if not one.exists() or not other.exists():
        return False
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return 0
    draw = random.Random(options.seed)
    killed, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="minddp-kills-") as top:
        unbroken = Path(top) / "unbroken"
        unbroken.mkdir()
        _, status = run(unbroken, 0, draw)
        assert status == 0 and (unbroken / "end.pt").exists(), (unbroken / "output.txt").read_text()
        for number in range(options.runs):
            folder = Path(top) / str(number)
            folder.mkdir()
            begin = time.monotonic()
            done, status = run(folder, draw.choice((1, 2)), draw)
            killed += done
            same = status == 0 and same_weights(unbroken / "end.pt", folder / "end.pt")
            if not same:
                wrong.append(number)
                print((folder / "output.txt").read_text())
            result = "as the unbroken one" if same else f"NOT as the unbroken one (torchrun ended with {status})"
            print(f"run {number}: {done} kills, {time.monotonic() - begin:.0f} s, {result}", flush=True)
    print(f"{options.runs} runs, {killed} ranks killed, ended otherwise than the unbroken run: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
