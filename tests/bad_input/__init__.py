"""Bad input as one table: what may be wrong with configs, data, tokenizers, kept files and commands,
and what easypipe says of each. `docs/bad_input.md` is written from it.
"""

from __future__ import annotations

from bad_input import commands, configs, data_files, doors, kept, models, rows, strange
from bad_input.case import Case

TABLES = (configs, data_files, rows, kept, commands, strange, doors, models)
KINDS: dict[str, list[Case]] = {kind: table.KINDS[kind] for table in TABLES for kind in table.KINDS}
