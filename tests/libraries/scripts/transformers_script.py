"""A user's script: the transformers Trainer on a tiny random GPT-2, resumed from a checkpoint."""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Digits(torch.utils.data.Dataset):
    """Sequences that count modulo 10, each from its own start with its own stride."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(12) * (1 + index % 3) + index
        return {"input_ids": tokens % 10, "labels": tokens % 10}


class Note(TrainerCallback):
    def __init__(self):
        self.name, self.losses = "", []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def on_substep_end(self, args, state, control, **kwargs):
        wrapped = self.trainer.model_wrapped
        self.name = f"{type(wrapped).__module__}.{type(wrapped).__name__}"


def train(folder: Path, steps: int, resume: bool):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=10,
        n_positions=12,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    note = Note()
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Digits(), callbacks=[note])
    note.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer, note


def main(out: str) -> None:
    folder = Path(out).parent
    trainer, first = train(folder, 4, resume=False)
    trainer, second = train(folder, 6, resume=True)
    weights = torch.cat([value.detach().flatten() for value in trainer.model.parameters()])
    report = {"class": second.name, "losses": first.losses + second.losses, "weights": weights.tolist()}
    if trainer.is_world_process_zero():
        Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
