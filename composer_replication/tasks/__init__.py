"""Built-in models and data: a small one that fits two CPU cores, and what language models of any size train on.

`MODELS` and `DATA` map the names that a recipe may use to import paths, so that nothing is imported before it is asked
for. Add your own by import path in the recipe (`model.class`, `data.class`); these tables are for what ships with us.
"""

from __future__ import annotations

__all__ = ["DATA", "DATA_URI", "LARGE", "MODELS", "STREAMS"]

# name -> "module:function". A model's function returns a torch.nn.Module, a data function a TextData
# or something else with `train_dataloader()` and `val_dataloader()`.
MODELS = {
    "byte_gpt": "composer_replication.tasks.byte_gpt:ByteGPT",
    "causal_lm": "composer_replication.tasks.causal_lm:causal_lm",
    "llama": "composer_replication.tasks.llama:llama",
}
DATA = {
    "text_bytes": "composer_replication.tasks.text:text_bytes",
    "text_lm": "composer_replication.tasks.text_lm:text_lm",
    "documents": "composer_replication.tasks.document_stream:document_stream",
    "conversations": "composer_replication.tasks.conversations:conversations",
}
# Those that a launcher doesn't build to try them: it may have neither the memory nor the files.
LARGE = frozenset({"causal_lm", "llama", "text_lm", "documents", "conversations"})
STREAMS = frozenset({"documents"})  # which know their replica, and have no length
DATA_URI = "DATA_URI"  # the variable that says where the text is, if nothing else does
