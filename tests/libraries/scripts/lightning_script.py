"""A user's script: Lightning's DDPStrategy, with automatic (accumulating) and with manual optimization."""

import json
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", category=UserWarning)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Automatic(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Manual(Automatic):
    """Two optimizers, stepped by hand; every second step accumulates without synchronizing."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=5e-2) for layer in (self.net[0], self.net[2])]

    def training_step(self, batch, index):
        inputs, targets = batch
        accumulates = index % 2 == 0
        strategy = self.trainer.strategy
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        with strategy.block_backward_sync() if accumulates else torch.enable_grad():
            self.manual_backward(loss)
        self.losses.append(loss.item())
        if not accumulates:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class NoteClass(lightning.Callback):
    def on_train_start(self, trainer, module):
        self.name = f"{type(trainer.strategy.model).__module__}.{type(trainer.strategy.model).__name__}"


def fit(module, **options):
    note = NoteClass()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", **options.pop("ddp", {})),
        max_epochs=2,
        callbacks=[note],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(make_data(), batch_size=8))
    return trainer, {
        "class": note.name,
        "losses": module.losses,
        "weights": torch.cat([value.detach().flatten() for value in module.parameters()]).tolist(),
    }


def main(out: str) -> None:
    lightning.seed_everything(0, verbose=False)
    _, automatic = fit(Automatic(), accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer, manual = fit(Manual(), ddp={"find_unused_parameters": True, "static_graph": False})
    if trainer.is_global_zero:
        Path(out).write_text(json.dumps({"automatic": automatic, "manual": manual}))


if __name__ == "__main__":
    main(sys.argv[1])
