"""The loss of a model on the sentences of train.py, as one line of JSON: python examples/evaluate.py MODEL"""

import json
import sys

import torch
from train import TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    batches = [tokenizer([text + "<end>"], return_tensors="pt").input_ids for text in TEXT]
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in batches]
print(json.dumps({"loss": round(sum(losses) / len(losses), 4)}))
