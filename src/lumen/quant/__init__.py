"""QuantizedTensor, Policy and recipes, QuantLinear, the `quantize` verb and its report.

report = quantize(model, "int8")                 a recipe, a Policy, or a dict like the YAML section
q = quantize_tensor(x, "int8:block32")           q.codes, q.scale, q.nbytes, q.dequantize()
"""

from lumen.quant.api import as_policy, dequantize, quantize
from lumen.quant.linear import QuantLinear
from lumen.quant.live import set_step
from lumen.quant.policy import Policy, Rule
from lumen.quant.report import Report, report
from lumen.quant.tensor import QuantizedTensor, quantize_tensor

__all__ = [
    "Policy", "QuantLinear", "QuantizedTensor", "Report", "Rule", "as_policy", "dequantize", "quantize",
    "quantize_tensor", "report", "set_step",
]  # fmt: skip
