"""The one command of the golden digests: what did a change alter?

    python tests/golden/compare.py                      # prints every value that is not what was kept; exit code 1 where there is one
    python tests/golden/compare.py batches resume       # of some groups, or cases: batches/greedy
    python tests/golden/compare.py --write              # and keeps what is now

Floating-point numbers may differ by 1e-5 of their size; all else must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOLERANCE = 1e-5
MISSING = "(nothing)"


def kept(group: str) -> dict[str, Any]:
    path = HERE / "expected" / f"{group}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def differences(was: Any, now: Any, at: str = "") -> Iterator[str]:
    """`place: was ..., is ...` of every leaf that differs."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from differences(
                was.get(key, MISSING), now.get(key, MISSING), f"{at}.{key}" if at else key
            )
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was, now, strict=True)):
            yield from differences(a, b, f"{at}[{i}]")
    elif isinstance(was, float) and isinstance(now, float):
        if not math.isclose(was, now, rel_tol=TOLERANCE):
            yield f"{at}: was {was!r}, is {now!r}"
    elif was != now or type(was) is not type(now):
        yield (
            f"{at}: was {json.dumps(was, ensure_ascii=False)}, is "
            f"{json.dumps(now, ensure_ascii=False)}"
        )


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, ensure_ascii=False))


def main() -> int:
    sys.path.insert(0, str(HERE.parent))
    from golden import cases

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="groups, or group/case")
    parser.add_argument("--write", action="store_true", help="keep what is now")
    given = parser.parse_args()
    chosen = [
        case
        for case in cases.all_cases()
        if not given.only or {case.group, f"{case.group}/{case.name}"} & set(given.only)
    ]
    if not chosen:
        parser.error(f"no case is named so: {' '.join(given.only)}")
    cases.writing = given.write
    found: dict[str, dict[str, Any]] = {}
    changed = failed = 0
    with tempfile.TemporaryDirectory(prefix="easypipe-golden-") as scratch:
        os.environ["EASYPIPE_CACHE"] = str(Path(scratch, "cache"))
        for number, case in enumerate(chosen):
            folder = Path(scratch, str(number))
            folder.mkdir()
            try:
                now = through_json(case.run(folder))
            except Exception as error:  # noqa: BLE001  (the other cases are compared all the same)
                failed += 1
                print(f"{case.group}/{case.name} failed: {type(error).__name__}: {error}")
                continue
            found.setdefault(case.group, {})[case.name] = now
            for line in differences(kept(case.group).get(case.name, MISSING), now):
                changed += 1
                print(f"{case.group}/{case.name} {line}")
    if given.write:
        for group, values in found.items():
            whole = {**(kept(group) if given.only else {}), **values}
            text = json.dumps(
                dict(sorted(whole.items())), indent=1, ensure_ascii=False, sort_keys=True
            )
            (HERE / "expected").mkdir(exist_ok=True)
            (HERE / "expected" / f"{group}.json").write_text(text + "\n", encoding="utf-8")
    print(
        f"{len(chosen)} cases, {failed} failed, {changed} values changed"
        + (", kept as they are now" if given.write else "")
    )
    return int(failed > 0 or (changed > 0 and not given.write))


if __name__ == "__main__":
    sys.exit(main())
