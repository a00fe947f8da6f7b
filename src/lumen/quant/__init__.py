"""QuantizedTensor, Policy and recipes, QuantLinear, the `quantize` verb and its report."""
