"""For the spikes: a small causal language model with a tokenizer of bytes, and text that every Python brings along."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # a spike is run as a file
    sys.path.insert(0, str(ROOT))

from composer_replication.tasks.text import text_bytes  # noqa: E402


def save_model(folder: Path, *, width: int = 128, layers: int = 4, context: int = 128, seed: int = 1) -> int:
    """Weights, configuration and tokenizer as the Hub keeps them; returns the number of parameters."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token="<|end|>", model_max_length=context
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=len(tokenizer) - 1,  # it was added last
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def save_text(file: Path, *, size: int = 2_000_000, piece: int = 4000) -> None:
    """The source of Python's standard library as documents of `piece` bytes, one a line."""
    whole = bytes(text_bytes(max_bytes=size).train.data.tolist()).decode("utf-8", errors="replace")
    documents = [whole[i : i + piece] for i in range(0, len(whole), piece)]
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
