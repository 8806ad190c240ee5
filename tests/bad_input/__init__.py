"""Bad input as one table: what may be wrong with configs, data, tokenizers, kept files and commands,
and what easypipe says of each. `docs/bad_input.md` is written from it.
"""

from __future__ import annotations

from bad_input import commands, configs, data_files, kept, rows, strange
from bad_input.case import Case

KINDS: dict[str, list[Case]] = (
    configs.KINDS | data_files.KINDS | rows.KINDS | kept.KINDS | commands.KINDS | strange.KINDS
)
