"""`lumen merge`: merge an adapter into its base, write a Hugging Face directory, verify it."""

from __future__ import annotations

import sys

USAGE = """usage: lumen merge [MERGE.yaml] [--adapter DIR] [--out DIR] [--model BASE] [key=value ...]

Merge an adapter into its base (fp32 arithmetic), write a Hugging Face directory, load it again and compare its logits
with the adapted model's. LLaMA-Factory's merge files are accepted. Without --adapter a full or freeze checkpoint is
written out.

  --adapter DIR        the adapter (adapter_name_or_path); a comma list is merged in order
  --out DIR            the directory to write (export_dir)
  --model BASE         the base model (model_name_or_path); default: the one the adapter names
  --allow-unchanged    merge although some targets have ΔW = 0
  --no-verify          do not load the directory again to compare
  --allow-remote-code  run code that the model ships
  --json               print the result as JSON
  key=value            any key of the file: infer_dtype=float32, export_size=2, template=qwen3
"""

SHORT = {"--adapter": "adapter_name_or_path", "--out": "export_dir", "--model": "model_name_or_path"}


def main(argv: list[str]) -> int:
    from lumen.cli.arguments import EXPORT_FLAGS, load_for_export, renamed, split

    arguments = split(renamed(argv, SHORT), EXPORT_FLAGS)
    if arguments.help:
        print(USAGE, end="")
        return 0
    if not argv:
        print(USAGE, end="", file=sys.stderr)
        return 2
    from lumen.core import ConfigError

    loaded = load_for_export(arguments)
    if loaded.run.export_format != "hf":
        raise ConfigError(
            f"`lumen merge` writes a merged directory, not {loaded.run.export_format}",
            where="export_format",
            fix="lumen export, with the same file",
        )
    from lumen.export.merge import merge

    result = merge(
        loaded.run,
        allow_unchanged="--allow-unchanged" in arguments.flags,
        verify="--no-verify" not in arguments.flags,
    )
    if "--json" in arguments.flags:
        import json
        from dataclasses import asdict

        print(json.dumps({**asdict(result), "directory": str(result.directory)}, ensure_ascii=False, indent=2))
    else:
        print("\n".join(result.lines()))
        print(f"{result.seconds:.1f} s; try it: lumen chat {result.directory}")
    return 0
