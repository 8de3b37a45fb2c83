"""Built-in models and data, for the quickstart and for tests: real training that fits two CPU cores.

`MODELS` and `DATA` map the names that a recipe may use to import paths, so that nothing is imported before it is asked
for. Add your own by import path in the recipe (`model.class`, `data.class`); these tables are for what ships with us.
"""

from __future__ import annotations

__all__ = ["DATA", "MODELS"]

# name -> "module:function". A model's function returns a torch.nn.Module, a data function a TextData.
MODELS = {"byte_gpt": "composer_replication.tasks.byte_gpt:ByteGPT"}
DATA = {"text_bytes": "composer_replication.tasks.text:text_bytes"}
