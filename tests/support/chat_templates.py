"""The structure of the chat templates of known model families, with the tokens that they use.

`generation` marks by hand what the assistant writes, up to and including its end of turn: the tests' own reading, which the
code under test never sees (`without_tags`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    template: str
    bos_token: str
    eos_token: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Tokens that are no special tokens: a text that spells them means them."""

    @property
    def without_tags(self) -> str:
        return self.template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- m.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA2 = """\
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'tool' %}
{{- raise_exception('there are no tools') }}
{%- elif m.role == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + m.content | trim + ' [/INST]' }}
{%- else %}
{%- generation %}{{- ' ' + m.content | trim + ' ' + eos_token }}{%- endgeneration %}
{%- endif %}
{%- endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{%- generation %}{{- m.tool_calls[0].function | tojson + '<|eot_id|>' }}{%- endgeneration %}
{%- elif m.role == 'assistant' %}
{%- generation %}{{- m.content | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- elif m.role == 'tool' %}
{{- m.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# The system turn is inside the last user turn, so every turn sees another beginning.
MISTRAL = """\
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set count = namespace(users=0) %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'user' %}
{%- set count.users = count.users + 1 %}
{%- set is_last = count.users == users | length %}
{%- if is_last and tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + (system if is_last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] ' + {'content': m.content} | tojson + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{%- generation %}{{- '[TOOL_CALLS] ' + m.tool_calls | tojson + eos_token }}{%- endgeneration %}
{%- else %}
{%- generation %}{{- ' ' + m.content | trim + eos_token }}{%- endgeneration %}
{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- raise_exception('there is no system turn') }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- raise_exception('there are no tools') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content | trim + '<end_of_turn>' }}{%- endgeneration %}
{%- else %}
{{- m.content | trim + '<end_of_turn>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# A conversation that is over ends with a token that generation never writes.
PHI3 = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- raise_exception('there are no tools') }}{%- endif %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content + '<|end|>' }}{%- endgeneration %}
{%- else %}
{{- m.content + '<|end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

# The roles are no tokens. A tool turn is left out.
ZEPHYR = """\
{%- for m in messages if m.role != 'tool' %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content + eos_token }}{%- endgeneration %}
{%- else %}
{{- m.content + eos_token }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

# Thoughts stay only after the last question.
QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endfor %}
{%- set seen = namespace(users=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set seen.users = seen.users + 1 %}{%- endif %}
{%- if m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else m.reasoning_content or '' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{%- if seen.users == asked.last and (loop.last or thought) %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>' }}{%- endgeneration %}
{{- '\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thoughts are never written, not even those of the last turn.
DEEPSEEK = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' }}
{%- generation %}{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '\\n' + call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- eos_token }}{%- endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""

FAMILIES = {
    "chatml": Family(CHATML, "<|im_start|>", "<|im_end|>"),
    "llama2": Family(LLAMA2, "<s>", "</s>"),
    "llama3": Family(
        LLAMA3, "<|begin_of_text|>", "<|end_of_text|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "mistral": Family(
        MISTRAL, "<s>", "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "gemma": Family(GEMMA, "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "phi3": Family(PHI3, "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "zephyr": Family(ZEPHYR, "<s>", "</s>"),
    "qwen3": Family(
        QWEN3, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",), ("<think>", "</think>", "<tool_call>", "</tool_call>")
    ),
    "deepseek": Family(
        DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ("<think>", "</think>"),
    ),
}  # fmt: skip
