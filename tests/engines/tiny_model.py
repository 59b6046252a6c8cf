"""Makes a tiny chat model without a network: `python tiny_model.py FOLDER`, in the engines' environment.

It is a Llama of some 200,000 random parameters (from a fixed seed) that reads and says ASCII only; as Hugging
Face files for vLLM and, where the package gguf is there, as `tiny.gguf` for llama.cpp. Nothing of the project
is imported here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # type: ignore[import-not-found]  # as below: it is in the engines' environment only
from tokenizers import (  # type: ignore[import-not-found]  # see above
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found]  # see above
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from gguf import GGUFWriter  # type: ignore[import-not-found]  # see above

SEED = 20
CONTEXT = 2048
VOCABULARY = 1024
HIDDEN, LAYERS, HEADS = 64, 2, 2

BEGIN, END, PAD = "<s>", "</s>", "<pad>"
TURN = "<turn>"
SPACE, NEWLINE = "\u0120", "\u010a"  # how a byte-level alphabet writes the two
TEMPLATE = (
    "{% for message in messages %}"
    + TURN
    + "{{ message['role'] }}\n{{ message['content'] }}"
    + END
    + "{% endfor %}"
    "{% if add_generation_prompt %}" + TURN + "assistant\n{% endif %}"
)


def sentences(count: int = 3000) -> Iterator[str]:
    """Text for the tokenizer to learn from: made-up words, the early ones more often."""
    rng = random.Random(SEED)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(600)]
    likely = [1 / rank for rank in range(1, len(words) + 1)]
    for _ in range(count):
        yield " ".join(rng.choices(words, likely, k=rng.randint(5, 15))) + "."


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of printable ASCII: llama.cpp answers 500 to nonsense that is no UTF-8 either."""
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, PAD, TURN],
        initial_alphabet=[*alphabet, SPACE, NEWLINE],
        show_progress=False,
    )
    bpe.train_from_iterator(sentences(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights from a fixed seed."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


# -- for llama.cpp -----------------------------------------------------------------------------------------

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names of a Llama's tensors and GGUF's, without the layer before and `.weight` behind."""


def tensor_name(name: str) -> str:
    """GGUF's name: `model.layers.1.mlp.up_proj.weight` is `blk.1.ffn_up.weight`."""
    bare = name.removesuffix(".weight")
    if not bare.startswith("model.layers."):
        return f"{TENSORS[bare]}.weight"
    number, _, part = bare.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{TENSORS[part]}.weight"


def write_gguf(path: Path, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> None:
    """The same model for llama.cpp. Rows of queries and keys would be reordered, were they not random."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    _describe(writer, model.config)
    _write_vocabulary(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(tensor_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: GGUFWriter, config: LlamaConfig) -> None:
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    from gguf import TokenType

    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_types(
        [TokenType.CONTROL if number in special else TokenType.NORMAL for number in range(len(tokenizer))]
    )
    writer.add_token_merges(list(_merges(tokenizer)))
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)


def _merges(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    import json

    for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]:
        yield pair if isinstance(pair, str) else " ".join(pair)


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if find_spec("gguf"):
        write_gguf(folder / "tiny.gguf", tokenizer, model)


if __name__ == "__main__":
    main()
