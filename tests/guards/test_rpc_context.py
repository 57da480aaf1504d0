"""Distributed autograd: left out, and said so where it would otherwise go wrong in silence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.rpc as rpc

from minddp import DistributedDataParallel
from minddp.testing import free_port, run_ranks


def forward_in_a_context(rank: int, world_size: int, port: int) -> str:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        ddp(torch.ones(2, 3)).sum().backward()  # an agent alone changes nothing
        averaged = ddp.module.weight.grad.clone()
        with torch.distributed.autograd.context(), pytest.raises(NotImplementedError) as raised:
            ddp(torch.ones(2, 3))
        ddp(torch.ones(2, 3)).sum().backward()
        torch.testing.assert_close(ddp.module.weight.grad, 2 * averaged)
    finally:
        rpc.shutdown()
    return str(raised.value)


@pytest.mark.timeout(120)
@pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC")
def test_a_forward_in_a_distributed_autograd_context_raises() -> None:
    texts = run_ranks(forward_in_a_context, 2, free_port(), env={"TP_SOCKET_IFNAME": "lo"})
    assert all("outside of the context" in text for text in texts)
