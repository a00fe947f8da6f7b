"""Every number format: its spec and its reference codec in plain torch.

    spec = QuantSpec.parse("int8:block32+sr")       str(spec) == "int8:block32+sr"
    codes, scales = encode(x, spec)                 codes and scale tensors
    x_hat = decode(codes, scales, spec, x.shape)    x_hat ≈ x

What is written here is the definition: a faster kernel is right when it matches it.
"""

from lumen.formats.catalog import FORMATS, Format
from lumen.formats.codec import BUILT, bits_per_value, decode, encode
from lumen.formats.noise import Noise
from lumen.formats.spec import Granularity, QuantSpec

__all__ = ["BUILT", "FORMATS", "Format", "Granularity", "Noise", "QuantSpec", "bits_per_value", "decode", "encode"]
