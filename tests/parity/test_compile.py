"""torch.compile, inside the wrapper and around it: eager's numbers, graphs split where torch's are."""

import copy
import warnings

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks


class Layers(nn.Module):
    """Not nn.Sequential itself: dynamo begins in no frame of torch's own, so torch's DDP would not compile that."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


@on_ranks(2, timeout=900)
def test_both_orders_split_graphs_as_torch_does(rank, world_size):
    torch.manual_seed(0)
    base = Layers([layer for _ in range(4) for layer in (nn.Linear(600, 600), nn.Tanh())])
    counts = {}
    results = {}

    def backend(key):
        def compile_graph(graph, inputs):
            counts[key] = counts.get(key, 0) + 1
            return graph.forward

        return compile_graph

    def train(model, parameters):
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model.zero_grad()
            model(torch.randn(4, 600)).pow(2).mean().backward()
        return [p.grad.clone() for p in parameters]

    for name, wrapper in (("torch", TorchDDP), ("minddp", DistributedDataParallel)):
        arguments = {"bucket_cap_mb": 2}  # one or two layers a bucket
        module = copy.deepcopy(base)
        results[name, "eager"] = train(wrapper(module, **arguments), list(module.parameters()))
        torch._dynamo.reset()
        module = copy.deepcopy(base)
        around = torch.compile(wrapper(module, **arguments), backend=backend((name, "around")))
        results[name, "around"] = train(around, list(module.parameters()))
        torch._dynamo.reset()
        module = copy.deepcopy(base)
        inside = wrapper(torch.compile(module, backend=backend((name, "inside"))), **arguments)
        results[name, "inside"] = train(inside, list(module.parameters()))
    for key, grads in results.items():
        for grad, eager in zip(grads, results["torch", "eager"]):
            torch.testing.assert_close(grad, eager, rtol=1e-6, atol=1e-7, msg=lambda m: f"{key}: {m}")
    counts = {" ".join(key): count for key, count in counts.items()}
    assert counts["minddp around"] == counts["torch around"] > 1, counts
    assert counts["minddp inside"] == counts["torch inside"] > 1, counts


@on_ranks(2)
def test_graphs_follow_the_buckets(rank, world_size):
    """By default, and with several caps nearly; one cap below the 1 MiB that Dynamo asks for is none to it."""
    arguments = {5: {}, 4: {"bucket_cap_mb_list": [1, 4, 2]}, 8: {"bucket_cap_mb": 0.5}}
    for expected, caps in arguments.items():
        graphs = []
        ddp = DistributedDataParallel(Layers([nn.Linear(512, 512) for _ in range(8)]), **caps)
        torch._dynamo.reset()
        compiled = torch.compile(ddp, backend=lambda graph, inputs, graphs=graphs: graphs.append(1) or graph)
        for _ in range(3):
            compiled(torch.ones(2, 512)).sum().backward()
        assert len(graphs) == len(ddp.reducer.buckets()) == expected, caps


@on_ranks(2)
def test_a_compiled_step_is_one_graph(rank, world_size):
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer, graphs = torch.optim.SGD(ddp.parameters(), 0.1), []
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend=lambda graph, inputs: graphs.append(1) or graph)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Dynamo.*")
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            step()
    assert len(graphs) == 1
