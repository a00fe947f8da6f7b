"""Held-out loss of an adapter, by one yardstick for every tool: runs inside the environment `peft`, in fp32.

usage: python score.py MODEL ROWS.json ADAPTER...   prints one JSON object: adapter → mean loss of the labelled tokens
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from rows import encode
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, rows_path, *adapters = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_path)
rows = [encode(tokenizer, row) for row in json.loads(Path(rows_path).read_text(encoding="utf-8"))]
result = {}
for adapter in ["", *adapters]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in rows:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            targets = torch.tensor(labels[1:])
            total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
            count += int((targets != -100).sum())
    result[adapter or "base"] = total / count
print(json.dumps(result))
