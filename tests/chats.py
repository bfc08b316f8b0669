"""The word-level tokenizer TOK of the mask and prompt tests, and its templates."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<u>", "<a>", "<e>"]
VOCABULARY = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz", "think"]

PLAIN = (
    "<s> {% for m in messages %}{% if m.role == 'assistant' %}<a> {{ m.content }} <e> {% else %}<u> {{ m.content }} "
    "<e> {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
MARKED = (
    "<s> {% for m in messages %}{% if m.role == 'assistant' %}<a> {% generation %}{{ m.content }} <e> "
    "{% endgeneration %}{% else %}<u> {{ m.content }} <e> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_tokenizer(
    template: str | None, *, end: str = "</s>", pad: str = "<pad>", words: list[str] = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Ids 0-6 are the specials, letters follow; the post-processor adds <s>."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=end, unk_token="<unk>", pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer
