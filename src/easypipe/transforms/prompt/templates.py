"""The built-in chat templates by name, and the wording of Alpaca's prompts.

Each template marks what the assistant says, so that spans need no proof. A stop that is not a token
of the tokenizer is ordinary text. What ends turns is always written, and always trained on.
"""

from __future__ import annotations

import re

_TEXT = """
{%- macro text_of(message) -%}
{%- if message.content is string -%}{{ message.content }}
{%- elif message.content is iterable -%}{%- for part in message.content -%}{{ part.text }}{%- endfor -%}
{%- elif message.content is not none -%}{{ raise_exception('the content of a message is no text') }}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- set number = loop.index0 -%}
{%- for key in ('function_call', 'name', 'refusal') -%}
{%- if message[key] and not (key == 'name' and message.role == 'tool') -%}
{{- raise_exception('message ' ~ number ~ ' has a ' ~ key ~ ', which this built-in template does not print') -}}
{%- endif -%}
{%- endfor -%}
{%- if (message.content is undefined or message.content is none) and not message.tool_calls and not message.reasoning_content -%}
{{- raise_exception('message ' ~ loop.index0 ~ ' says nothing: it has no content and no tool calls') -}}
{%- endif -%}
{%- endfor -%}
"""
_NO_TOOLS = """
{%- if tools -%}{{ raise_exception('this built-in template knows no tools: take chatml') }}{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}{{ raise_exception('this built-in template knows no tool calls: take chatml') }}{%- endif -%}
{%- if message.reasoning_content -%}{{ raise_exception('this built-in template knows no reasoning: take chatml') }}{%- endif -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}
{{- raise_exception('this built-in template knows system, user and assistant alone, not ' ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
"""
_BOS = "{%- if bos_token and bos_token != eos_token -%}{{ bos_token }}{%- endif -%}"
_EOS = (
    "{%- if not eos_token -%}{{ raise_exception('the tokenizer names no EOS token, which ends "
    "turns here') }}{%- endif -%}"
)

CHATML = (
    _TEXT
    + _BOS
    + """
{%- set first = messages[0] -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if first.role == 'system' -%}{{ text_of(first) ~ '\\n\\n' }}{%- endif -%}
{{- 'You may call these functions:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{ tool|tojson ~ '\\n' }}{%- endfor -%}
{{- '</tools>\\nA call is a JSON object with name and arguments, between <tool_call> and </tool_call>.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if tools and loop.first and message.role == 'system' -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{%- if message.reasoning_content -%}{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif -%}
{{- text_of(message) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if not loop.first or message.content -%}{{ '\\n' }}{%- endif -%}
{{- '<tool_call>\\n{"name": ' ~ function.name|tojson ~ ', "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments|tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ text_of(message) ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
)
_TURNS = (
    _TEXT
    + _NO_TOOLS
    + _EOS
    + _BOS
    + """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- ASSISTANT -}}{%- generation -%}{{ text_of(message) ~ eos_token }}{%- endgeneration -%}{{ '\\n' }}
{%- else -%}
{{- (SYSTEM if message.role == 'system' else USER) ~ text_of(message) ~ AFTER -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ASSISTANT }}{%- endif -%}
"""
)


def _turns(system: str, user: str, assistant: str, *, after: str) -> str:
    """Returns a template of three headers.

    `after`, a Jinja expression, follows every turn except the assistant's, which ends with EOS.
    """
    values = {
        "SYSTEM": repr(system),
        "USER": repr(user),
        "ASSISTANT": repr(assistant),
        "AFTER": after,
    }
    return re.sub("|".join(values), lambda found: values[found[0]], _TURNS)


CHAT_TEMPLATES = {
    "chatml": CHATML,
    "plain": _turns("System: ", "User: ", "Assistant: ", after="'\\n'"),
    "zephyr": _turns("<|system|>\n", "<|user|>\n", "<|assistant|>\n", after="eos_token ~ '\\n'"),
    "alpaca": _turns("", "### Instruction:\n", "### Response:\n", after="'\\n\\n'"),
}

# The two prompts of the Alpaca data set (github.com/tatsu-lab/stanford_alpaca); models were tuned
# on exactly these words.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n{output}"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}"
)
