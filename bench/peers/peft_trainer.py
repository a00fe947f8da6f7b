"""PEFT + Hugging Face Trainer, as its documentation has it: runs inside the environment `peft`.

usage: python peft_trainer.py SETTINGS.json
Writes one JSON line for every finished optimizer step to `log`, and the adapter to `output_dir`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rows import encode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

settings = json.loads(Path(sys.argv[1]).read_text())


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with Path(settings["log"]).open("a") as log:
            log.write(json.dumps({"step": state.global_step}) + "\n")


tokenizer = AutoTokenizer.from_pretrained(settings["model"])
rows = json.loads(Path(settings["rows"]).read_text(encoding="utf-8"))
# a row is a conversation to be encoded, or already [ids, labels]
encoded = [row if isinstance(row, list) else encode(tokenizer, row) for row in rows]
data = [{"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)} for ids, labels in encoded]

torch.manual_seed(42)
model = AutoModelForCausalLM.from_pretrained(
    settings["model"], dtype=torch.bfloat16, attn_implementation=settings.get("attention", "sdpa")
)
model.config.use_cache = False
if "adapter" in settings:  # go on from given values, so that two tools start from the same ones
    model = PeftModel.from_pretrained(model, settings["adapter"], is_trainable=True)
else:
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
trainer = Trainer(
    model=model,
    train_dataset=data,
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
    callbacks=[Steps()],
    args=TrainingArguments(
        output_dir=settings["output_dir"],
        bf16=True,
        use_cpu=True,
        learning_rate=settings["learning_rate"],
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings["accumulation"],
        max_steps=settings.get("steps", -1),
        num_train_epochs=settings.get("epochs", 1),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        weight_decay=0.0,
        **{"lr_scheduler_type": "linear", **settings.get("arguments", {})},
    ),
)
trainer.train()
model.save_pretrained(settings["output_dir"])
