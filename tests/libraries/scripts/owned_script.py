"""A user's script: minddp.Owned in the optimizer's place under Accelerate, Lightning and the transformers Trainer.

Each trains twice, with the plain optimizer and with Owned, with clipping; the Trainer saves, and goes on from that.
"""

import json
import sys
from pathlib import Path

import accelerate_script
import lightning_script
import torch
import transformers_script
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import minddp


def optimizer_of(module: nn.Module, owned: bool) -> torch.optim.Optimizer:
    if owned:
        return minddp.Owned(module, [(module.parameters(), torch.optim.AdamW, {"lr": 1e-2})])
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def weights(module: nn.Module) -> list[float]:
    return torch.cat([value.detach().flatten() for value in module.parameters()]).tolist()


def by_accelerate(owned: bool) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optimizer_of(model, owned)
    loader = DataLoader(accelerate_script.make_data(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerate_script.train(accelerator, model, optimizer, loader, epochs=2)
    return weights(model)


class Automatic(lightning_script.Automatic):
    owned = False

    def configure_optimizers(self):
        return optimizer_of(self, self.owned)


def by_lightning(owned: bool) -> list[float]:
    lightning_script.lightning.seed_everything(0, verbose=False)
    module = Automatic()
    module.owned = owned
    _, report = lightning_script.fit(module, accumulate_grad_batches=2, gradient_clip_val=1.0)
    return report["weights"]


class Consolidate(TrainerCallback):
    """All that saving costs: the Trainer calls state_dict() on rank 0 alone."""

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if control.should_save:
            getattr(optimizer, "optimizer", optimizer).consolidate_state_dict()


def by_trainer(folder: Path, owned: bool) -> list[float]:
    for steps in (4, 6):  # the second goes on from what the first has saved
        torch.manual_seed(0)
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=12, n_embd=16, n_layer=2, n_head=2, **dropouts))
        arguments = TrainingArguments(
            output_dir=str(folder / f"checkpoints-{owned}"),
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=steps,
            save_steps=4,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=transformers_script.Digits(),
            optimizers=(optimizer_of(model, owned), None),
            callbacks=[Consolidate()] if owned else [],
        )
        trainer.train(resume_from_checkpoint=steps == 6)
    return weights(trainer.model)


def main(out: str) -> None:
    report = {
        "accelerate": [by_accelerate(owned) for owned in (False, True)],
        "lightning": [by_lightning(owned) for owned in (False, True)],
        "trainer": [by_trainer(Path(out).parent, owned) for owned in (False, True)],
    }
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
