"""A user's script: pytorch-ignite's trainer around idist.auto_model and auto_optim, with SyncBatchNorm left alone."""

import json
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import TensorDataset


def training(rank: int, out: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.argmax(1))
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=False)
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=2)
    accuracy, losses = Accuracy(), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine) -> None:
        losses.append(idist.all_reduce(engine.state.output, "SUM"))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine) -> None:
        accuracy.reset()
        with torch.no_grad():
            for batch, targets in loader:
                accuracy.update((model(batch), targets))

    trainer.run(loader, max_epochs=3)
    report = {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "losses": losses,
        "weights": [*torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), accuracy.compute()],
    }
    if rank == 0:
        Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, sys.argv[1])
