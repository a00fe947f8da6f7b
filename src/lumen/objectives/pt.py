"""Pretraining: the same next-token loss; data labels every token but the first of each document."""

from lumen.objectives.sft import LossSums, loss_sum

__all__ = ["LossSums", "loss_sum"]
