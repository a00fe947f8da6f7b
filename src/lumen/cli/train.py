"""`lumen train FILE [key=value …] [--dry-run]`: train, or print the resolved plan and end."""

from __future__ import annotations

FLAGS = {
    "--dry-run": "print the resolved plan (parameters, steps, memory, data) and end without training",
    "--target NAME": "compute the numbers of another chip (gfx942, MI300X) and report for it; the same as quant.target",
    "--allow-remote-code": "let a model run code that it ships; read that code first",
}


def main(argv: list[str]) -> int:
    import os

    # Waiting OpenMP threads spin for milliseconds and starve whatever else runs on this machine; a short spin costs
    # nothing alone.  It is read when torch is imported, so it is set here.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from lumen.cli.arguments import renamed, split

    arguments = split(renamed(argv, {"--target": "quant.target"}), FLAGS)
    if arguments.help or (arguments.file is None and not arguments.overrides):
        print(usage())
        return 0 if arguments.help else 2
    from lumen.cli.api import load_for_training, resolved_yaml

    values = {"allow_remote_code": True} if "--allow-remote-code" in arguments.flags else None
    loaded = load_for_training(arguments.file, arguments.overrides, values)
    if "--dry-run" in arguments.flags:
        from lumen.trainer.dry_run import dry_run

        print("\n".join(dry_run(loaded.run)))
        return 0
    from lumen.trainer.train import run_training

    return run_training(loaded.run, resolved=resolved_yaml(loaded)).exit_code


def usage() -> str:
    width = max(map(len, FLAGS))
    lines = [f"  {flag:<{width}}  {text}" for flag, text in FLAGS.items()]
    return "\n".join(
        [
            "usage: lumen train FILE [key=value ...] [--key value ...] [flags]",
            "",
            "Trains as FILE says (YAML, LLaMA-Factory's and Hugging Face's names are understood); overrides win.",
            "An output_dir that holds a checkpoint is resumed; Ctrl-C and SIGTERM save and leave (exit 130, 143).",
            "",
            *lines,
            "",
            "`lumen config keys` lists every key.",
        ]
    )
