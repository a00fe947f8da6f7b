"""What many tests need: tiny models and a tokenizer made on the spot, the shared data, the sample model.

Nothing here touches the network.  What a machine lacks (shared data, the sample model) skips with the reason.
"""

from tests.helpers.assets import shared_data, smollm2_gguf
from tests.helpers.runs import run_config, run_values, write_rows
from tests.helpers.tiny import TINY_ARCHITECTURES, save_tiny, tiny_llama, tiny_model, tiny_tokenizer

__all__ = [
    "TINY_ARCHITECTURES", "run_config", "run_values", "save_tiny", "shared_data", "smollm2_gguf", "tiny_llama",
    "tiny_model", "tiny_tokenizer", "write_rows",
]  # fmt: skip
