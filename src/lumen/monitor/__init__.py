"""Metric names once; JSONL, TensorBoard, progress bar, loss plot, the reading of the curves."""
