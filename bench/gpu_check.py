"""Does this GPU train as the CPU does?  `make gpu-check`, or `python -m bench.gpu_check`.

For each case a random llama is trained for a few steps on the GPU and, from the same seed and rows, in fp32 on the CPU.
Losses must stay within the case's tolerance step by step, and must fall.  Before that, the products on which
everything stands (linear layer and attention, forward and backward) are compared with fp64 on the CPU, because a
product that is silently wrong on a chip would otherwise show as a model that learns badly.

Exit status: 0 all cases hold, 1 one does not, 2 there is no GPU that torch can use.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lumen.doctor.numeric import wrong_products

STEPS = 6


@dataclass(frozen=True)
class Case:
    """One training on the GPU: configuration, how far a step's loss may be from the CPU's fp32 (relative), method."""

    name: str
    settings: dict[str, Any]
    tolerance: float
    method: str = "full"


@dataclass
class Outcome:
    """What came of a case."""

    case: str
    model: str
    losses: list[float]
    reference: list[float]
    tolerance: float
    tokens_per_second: float = 0.0
    peak_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """The largest relative difference of a step's loss."""
        return max(abs(a - b) / b for a, b in zip(self.losses, self.reference, strict=True))

    def judge(self) -> Outcome:
        """Fill `problems`."""
        if self.gap > self.tolerance:
            self.problems.append(f"loss is {self.gap:.2%} from the CPU's, {self.tolerance:.2%} is allowed")
        if not self.losses[-1] < self.losses[0]:
            self.problems.append(f"loss does not fall: {self.losses[0]:.4f} to {self.losses[-1]:.4f}")
        return self


CASES = (
    Case("fp32", {}, 2e-3),
    Case("bf16", {"bf16": True}, 2e-2),
    Case("fp16", {"fp16": True}, 1e-2),
    Case("int8", {"bf16": True, "quant": {"recipe": "int8"}}, 4e-2),
    Case("int8-weight-only", {"bf16": True, "quant": {"recipe": "int8-weight-only"}}, 3e-2, "lora"),
)
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "num_hidden_layers": 2},
    "smollm2-size": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "head_dim": 64,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}


def write_inputs(folder: Path, model: str) -> None:
    """A random model directory and a data file below `folder`."""
    from tests.helpers import save_tiny, tiny_llama

    save_tiny(folder / "model", tiny_llama(**MODELS[model]))
    rows = [
        {"instruction": f"Count to {n}.", "output": " ".join(str(i) for i in range(1, n + 1))} for n in range(20, 68)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(
    folder: Path, device: str, settings: dict[str, Any], method: str = "full", *, steps: int = STEPS
) -> tuple[list[float], float]:
    """(loss of each step, tokens a second) of one run on one device; method is full or lora."""
    import lumen

    output = folder / f"run-{device.replace(':', '-')}"
    result = lumen.train(
        model_name_or_path=str(folder / "model"),
        dataset=str(folder / "rows.jsonl"),
        output_dir=str(output),
        overwrite_output_dir=True,
        device=device,
        finetuning_type=method,
        learning_rate=1e-3 if method == "full" else 1e-2,
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=4,
        cutoff_len=256,
        save_strategy="no",
        compile="off",
        plot_loss=False,
        **settings,
    )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return losses, float(result.metrics.get("tokens_per_second", 0.0))


def run_case(case: Case, model: str, device: str, reference: list[float], folder: Path) -> Outcome:
    """Train one case on the GPU and judge it."""
    torch.cuda.reset_peak_memory_stats()
    losses, speed = train(folder, device, case.settings, case.method)
    peak = torch.cuda.max_memory_allocated()
    return Outcome(case.name, model, losses, reference, case.tolerance, speed, peak).judge()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", metavar="FILE", help="also write the outcomes here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here; `lumen hardware` says why", file=sys.stderr)
        sys.exit(2)
    properties = torch.cuda.get_device_properties(arguments.device)
    name = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    print(f"{torch.cuda.get_device_name(arguments.device)} ({name}), torch {torch.__version__}")
    wrong = wrong_products(arguments.device)
    print("\n".join(f"WRONG  {line}" for line in wrong) or "linear and attention agree with fp64")
    outcomes = []
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), model)
            references = {}
            for method in dict.fromkeys(case.method for case in CASES):
                references[method], cpu_speed = train(Path(folder), "cpu", {}, method)
                print(f"\n{model}, {method}: CPU fp32 {cpu_speed:.0f} tokens/s, {_shown(references[method])}")
            for case in CASES:
                outcome = run_case(case, model, arguments.device, references[case.method], Path(folder))
                outcomes.append(outcome)
                verdict = "ok" if not outcome.problems else "WRONG " + "; ".join(outcome.problems)
                speed = f"{outcome.tokens_per_second:>9.0f} tokens/s {outcome.peak_bytes / 2**30:>6.2f} GiB"
                gap = f"gap {outcome.gap:.2e} of {case.tolerance:.0e}"
                print(f"  {case.name:<18}{speed}  {gap}  {verdict}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([outcome.__dict__ for outcome in outcomes], indent=2))
    failed = wrong or [outcome for outcome in outcomes if outcome.problems]
    print(f"\ngpu-check: {'FAILED' if failed else 'all hold'}")
    sys.exit(1 if failed else 0)


def _shown(losses: list[float]) -> str:
    return " ".join(f"{loss:.3f}" for loss in losses)


if __name__ == "__main__":
    main()
