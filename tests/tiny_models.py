"""Tiny random models of every family and a tokenizer made on the spot."""

from functools import partial

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 128
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)

SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
SHAPE |= dict(vocab_size=VOCABULARY, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HYBRID = ["sliding_attention", "full_attention"] * 2
WINDOW = 24


GEMMA3 = dict(head_dim=16, sliding_window=WINDOW, layer_types=HYBRID, query_pre_attn_scalar=16)


def _causal_lm(name: str, **shape) -> PreTrainedModel:
    config = transformers.Gemma3TextConfig if name == "Gemma3" else getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**SHAPE, **shape))


def _gemma3_image_text() -> PreTrainedModel:
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**SHAPE, **GEMMA3),
        vision_config=transformers.SiglipVisionConfig(**vision, image_size=16, patch_size=8),
        mm_tokens_per_image=4,
        image_token_index=100,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


FAMILIES = {
    "llama": partial(_causal_lm, "Llama"),
    "mistral": partial(_causal_lm, "Mistral", sliding_window=None),
    "mistral-sliding": partial(_causal_lm, "Mistral", sliding_window=WINDOW),
    "phi3": partial(_causal_lm, "Phi3", sliding_window=None),
    "phi3-sliding": partial(_causal_lm, "Phi3", sliding_window=WINDOW),
    "qwen2": partial(_causal_lm, "Qwen2"),
    "qwen3": partial(_causal_lm, "Qwen3", head_dim=16),
    "gemma3": partial(_causal_lm, "Gemma3", **GEMMA3),
    "gemma3-image-text": _gemma3_image_text,
}


def build_model(family: str, seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    """A random model in evaluation mode. Larger query and key weights make its attention uneven, as in a real one."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "embed_tokens")):
                parameter.mul_(scale)
            elif "v_proj" in name or "o_proj" in name:
                parameter.mul_(3)
    return model


def build_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character, and the three special tokens."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<e>": 2, "<unk>": 3}
    vocabulary |= {chr(code): len(vocabulary) + index for index, code in enumerate(range(32, 127))}
    vocabulary["\n"] = len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<e>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def random_ids(length: int, batch_size: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 99, (batch_size, length), generator=generator)
