"""A user's script: LoRA by PEFT on a tiny random GPT-2 under transformers' Trainer, with gradient checkpointing."""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers_script import Digits, Note


def main(out: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=10, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"]))
    arguments = TrainingArguments(
        output_dir=str(Path(out).with_suffix("")),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=6,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-1,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    note = Note()
    trainer = Trainer(model, arguments, train_dataset=Digits(), callbacks=[note])
    note.trainer = trainer
    trainer.train()
    adapters = get_peft_model_state_dict(model)
    report = {
        "class": note.name,
        "losses": note.losses,
        "weights": torch.cat([value.flatten() for _, value in sorted(adapters.items())]).tolist(),
    }
    if trainer.is_world_process_zero():
        Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
