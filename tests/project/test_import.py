"""What ``import minddp`` does to a process is what the package's docstring says."""

import subprocess
import sys

PROGRAM = """
import atexit
import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def hooks():
    tables = [
        modules._global_parameter_registration_hooks, modules._global_module_registration_hooks,
        modules._global_buffer_registration_hooks, modules._global_forward_hooks,
        modules._global_forward_pre_hooks, modules._global_backward_hooks,
        optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks,
    ]
    return sum(map(len, tables))

before, backends, ends = hooks(), set(dist.Backend.backend_list), atexit._ncallbacks()
import minddp
print(hooks() - before, sorted(set(dist.Backend.backend_list) - backends), atexit._ncallbacks() > ends)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
minddp.DistributedDataParallel(torch.nn.Linear(1, 1))
print(hooks() > before)
dist.destroy_process_group()
"""


def test_import_does_what_it_says() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["0 ['auto', 'shm'] True", "True"], done.stdout + done.stderr
