"""A user's script: Accelerate: gradient accumulation, no_sync, unwrapping, a saved and loaded state."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def train(accelerator, model, optimizer, loader, epochs):
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


def local_gradients_differ(accelerator, model, loader) -> bool:
    """Within no_sync every rank keeps its own gradients."""
    inputs, targets = next(iter(loader))
    with accelerator.no_sync(model):
        nn.functional.mse_loss(model(inputs), targets).backward()
    gradients = accelerator.gather(next(model.parameters()).grad[None])
    model.zero_grad()
    return not torch.equal(gradients[0], gradients[1])


def main(out: str) -> None:
    torch.manual_seed(0)
    options = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[options])
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=8))
    losses = train(accelerator, model, optimizer, loader, epochs=3)

    with tempfile.TemporaryDirectory() as folder:
        shared = Path(out).parent / "accelerate-state" if accelerator.num_processes > 1 else Path(folder)
        accelerator.save_state(str(shared))
        expected = train(accelerator, model, optimizer, loader, epochs=1)
        accelerator.wait_for_everyone()
        accelerator.load_state(str(shared))
        assert train(accelerator, model, optimizer, loader, epochs=1) == expected, "not the saved state"

    plain = accelerator.unwrap_model(model)
    report = {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "unwrapped": type(plain).__name__,
        "losses": losses + expected,
        "weights": torch.cat([value.float().flatten() for value in plain.state_dict().values()]).tolist(),
        "no_sync_is_local": local_gradients_differ(accelerator, model, loader),
    }
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
