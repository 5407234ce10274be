"""The 'chaotic' tiny Llama: random weights whose greedy output hardly repeats (118 of 120 tokens distinct).

A model that repeats itself would hide a corrupted KV cache; this one diverges at the next token.
Run by the engine's Python (it needs torch and transformers): ``python tiny_model.py DIRECTORY``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["tiny_model"]

_NAME = "tiny-llama-chaotic"
_VOCABULARY = 8192
_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_model(models: Path, *, python: str) -> Path:
    """The model's folder under `models`, built once with the engine's interpreter `python`."""
    final = models / _NAME
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{_NAME}-", dir=models))
    try:
        subprocess.run([python, __file__, str(draft)], check=True, capture_output=True, text=True)
        draft.chmod(0o755)
        draft.rename(final)
    except OSError:
        if not final.is_dir():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _build(directory: str) -> None:
    from tokenflow_engine.sglang import cpu_compat

    cpu_compat.install()  # transformers imports torchvision
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    _tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.15,  # wide weights make the logits chaotic
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)


def _tokenizer() -> Any:
    """A byte-level BPE trained on the standard library's sources, which every machine has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train(sorted(str(p) for p in Path(sysconfig.get_path("stdlib")).glob("*.py")), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _build(sys.argv[1])
