"""Conversations, templates and a small tokenizer that knows the words of ChatML."""

from __future__ import annotations

import functools
import json
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from easypipe.transforms.tokenizer.bpe import train_bpe

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not (SHARED / "templates").is_dir(), reason="needs ../shared/data/templates"
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ "
    "'<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% "
    "endif %}{% endfor %}"
)
# As Qwen3's: reasoning of turns before the last question is not printed, an empty thought is
# printed in the last one.
REASONING = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- if ns.last == messages|length - 1 and message.role == 'user' %}
{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content = message.content %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last %}{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}
{{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# name -> (a template that goes too far, what the error says of it)
LIMITS = ("processor", "memory", "characters")  # what a row alone may be to blame for
HOSTILE = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "processor time",
    ),
    "a huge range": ("{% for a in range(10**9) %}x{% endfor %}", "too much"),
    "a giant string": ("{{ 'a' * 10**10 }}", "memory"),
    "doubling": (
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor "
        "%}",
        "memory|processor",
    ),
    "a wide format": ("{{ '{:>9999999999}'.format(1) }}", "memory"),
    "endless output": ("{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "characters"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox"),
    "attributes by format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "sandbox"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "sandbox"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    "a constant that cannot be worked out": ("{{ (10 ** 100000) | string }}", "not compile"),
    "no Jinja": ("{% for %}", "not Jinja"),
    "deep nesting": ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "deeply"),
}

WORDS = [
    "What is two and two?",
    "Four.",
    "Sure?",
    " Yes, I am sure. ",
    "the quick brown fox",
    "naïve 日本 😀",
    '{"a": 1}',
]


@contextmanager
def processor_time_of_workers(most: float) -> Iterator[None]:
    """Fails where worker processes that ended meanwhile have used more seconds of processor time,
    whatever a clock says.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < most


@functools.cache
def chat_tokenizer() -> str:
    """A folder: byte-level BPE of 400 tokens with <|im_start|> and <|im_end|> (its EOS) and ChatML
    as its chat template.
    """
    folder = Path(tempfile.mkdtemp(prefix="easypipe-test-chat-")) / "tokenizer"
    train_bpe([word + "\n" for word in WORDS] * 20, 400, ["<|im_start|>", "<|im_end|>"], folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"eos_token": "<|im_end|>", "chat_template": CHATML}
    path.write_text(json.dumps(values))
    return str(folder)


def without_template(folder: Path) -> str:
    """The same tokenizer with no chat template."""
    shutil.copytree(chat_tokenizer(), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads(path.read_text()).items()
                if key != "chat_template"
            }
        )
    )
    return str(folder)


def talk(*said: str | None, system: str | None = None) -> list[dict[str, Any]]:
    """user, assistant, user, ...; after a system prompt if there is one."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def talks(count: int) -> list[dict[str, Any]]:
    """Rows of conversations of two to seven turns, no two alike."""
    return [
        {
            "messages": talk(
                *(f"{WORDS[(i * k + k) % len(WORDS)]} {i}" for k in range(2 + i % 6)),
                system="Be brief." if i % 3 == 0 else None,
            )
        }
        for i in range(count)
    ]
