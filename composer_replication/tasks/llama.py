"""A Llama of given sizes with fresh weights. Needs `transformers`."""

from __future__ import annotations

from torch import nn

from composer_replication.tasks.causal_lm import ready_to_train, transformers_module

__all__ = ["llama"]


def llama(
    *,
    width: int = 1024,
    layers: int = 12,
    heads: int = 16,
    kv_heads: int | None = None,
    hidden: int = 2688,
    vocabulary: int = 32_000,
    context: int = 1024,
    tied: bool = False,
    rope_theta: float = 10_000.0,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """Maps token ids (batch, time) to an output with `logits` (batch, time, vocabulary); weights are float32.

    The defaults are 214,983,680 parameters.

    Args:
        width: of the residual stream; a multiple of 2 * heads.
        heads, kv_heads: of attention, and of its keys and values (None: as many).
        hidden: width of the gated MLP.
        context: the longest sequence it is meant for.
        tied: one matrix for the embedding and the head.
        gradient_checkpointing: compute activations a second time rather than keep them.

    Raises ValueError for sizes that don't fit together, RecipeError without transformers.
    """
    own = kv_heads if kv_heads is not None else heads
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": own, "hidden": hidden}
    for name, value in {**sizes, "vocabulary": vocabulary, "context": context}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if width % (2 * heads):
        raise ValueError(f"width must be a multiple of 2 * heads = {2 * heads}, got {width}")
    if heads % own:
        raise ValueError(f"kv_heads must divide heads = {heads}, got {own}")
    if not rope_theta > 0:
        raise ValueError(f"rope_theta must be a positive number, got {rope_theta}")
    library = transformers_module()
    config = library.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=own,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **_rope(library, rope_theta),
    )
    return ready_to_train(library.LlamaForCausalLM(config), gradient_checkpointing)


def _rope(library: object, theta: float) -> dict[str, object]:
    """Transformers 5 puts it among other settings of the rotation."""
    major = int(str(getattr(library, "__version__", "0")).split(".")[0])
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}} if major >= 5 else {"rope_theta": theta}
