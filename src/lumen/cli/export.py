"""`lumen export`: write a model in the format of an engine, and verify it; also LLaMA-Factory's merge files."""

from __future__ import annotations

import sys

USAGE = """usage: lumen export [FILE.yaml] [--model BASE] [--adapter DIR] [--format NAME] [--out DIR] [key=value ...]

Write a model in the format of an engine: merge the adapter (fp32 arithmetic), quantise, load the result again, and
compare it with its source on held-out rows. Above the limit nothing is written. LLaMA-Factory's merge files are
accepted and give a merged Hugging Face directory.

  --model BASE         the model (model_name_or_path); default: the one the adapter names
  --adapter DIR        an adapter to merge first (adapter_name_or_path); a comma list is merged in order
  --out DIR            the directory to write (export_dir)
  --format NAME        export_format:
                         hf                         merged Hugging Face directory (default)
                         adapter                    PEFT adapter, checked for vLLM
                         fp8, fp8-static            compressed-tensors FP8, activations scaled per token or once
                         int8, w8a16, int4          compressed-tensors INT8 W8A8, W8A16, INT4 W4A16
                         gguf-f16 gguf-bf16 gguf-q8_0 gguf-q4_0      llama.cpp, Ollama
                         gguf-q4_k_m gguf-q5_k_m gguf-q6_k …         with the extra `kquants`
                         onnx                       with the extra `onnx`
  --allow-unchanged    merge although some targets have ΔW = 0
  --no-verify          do not load the export again to compare (export_verify: false)
  --allow-remote-code  run code that the model ships
  --json               print the report as JSON
  key=value            any key of the file: export_max_kl=0.01, export_verify_data=rows.jsonl, export_group_size=64
"""

SHORT = {
    "--adapter": "adapter_name_or_path",
    "--out": "export_dir",
    "--model": "model_name_or_path",
    "--format": "export_format",
}


def main(argv: list[str]) -> int:
    from lumen.cli.arguments import EXPORT_FLAGS, load_for_export, renamed, split

    arguments = split(renamed(argv, SHORT), EXPORT_FLAGS)
    if arguments.help:
        print(USAGE, end="")
        return 0
    if not argv:
        print(USAGE, end="", file=sys.stderr)
        return 2
    loaded = load_for_export(arguments)
    from lumen.export.run import export

    result = export(loaded.run, allow_unchanged="--allow-unchanged" in arguments.flags)
    if "--json" in arguments.flags:
        import json

        print(json.dumps(result.to_dict(), ensure_ascii=False, indent=2))
        return 0
    print("\n".join(result.lines()))
    print(f"{result.seconds:.1f} s; serve it:")
    print("\n".join(f"  {line}" for line in result.handover))
    return 0
