"""Try generated input on every property of tests/support/fuzz.py for some minutes, and record the counts and outcomes.

python benchmarks/fuzz.py --minutes 10 docs/promises/reliability.md       (make fuzz MINUTES=10)
python benchmarks/fuzz.py --only "files of text" --seed 7        one property, from a seed that failed
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz import Property

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
AT_ONCE = {False: 100, True: 10}
"""Inputs per seed, after which the time limit is checked; fewer where each input starts processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="page whose block `fuzz` is replaced")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", help="one property")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first inputs")
    arguments = parser.parse_args()

    from fuzz import PROPERTIES
    from tqdm import tqdm

    from acc_lm.studies.tables import machine_line, replace_block

    names = [arguments.only] if arguments.only else list(PROPERTIES)
    seconds = 60 * arguments.minutes / len(names)
    rows, failures = [], 0
    for name in names:
        seen, failed, seed, start = Counter[str](), {}, arguments.seed, time.monotonic()
        with tqdm(total=round(seconds), unit="s", desc=name) as bar:
            while time.monotonic() - start < seconds:
                try_inputs(PROPERTIES[name], seed, seen, failed)
                seed += 1
                bar.n = min(round(time.monotonic() - start), bar.total)
                bar.set_postfix(inputs=sum(seen.values()), failed=len(failed))
        for text in failed.values():
            print(text, file=sys.stderr)
        failures += len(failed)
        what = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(seen.items()))
        rows.append(f"| {name} | {sum(seen.values()):,} | {what} | {len(failed)} |")
    lines = [
        f"`make fuzz MINUTES={arguments.minutes:g}`, that is `python benchmarks/fuzz.py --minutes {arguments.minutes:g} docs/promises/reliability.md`:",
        "",
        machine_line(),
        "",
        "| generated input | count | outcomes | distinct tracebacks and wrong results |",
        "|---|---|---|---|",
        *rows,
    ]
    print(*lines, sep="\n")
    if arguments.page:
        replace_block(arguments.page, "fuzz", "\n".join(lines))
    sys.exit(failures > 0)


def try_inputs(checked: Property, seed: int, seen: Counter[str], failed: dict[str, str]) -> None:
    """Try the inputs of one seed; shrink a failing input and store it under the place where it failed."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as from_seed

    @from_seed(seed)
    @settings(
        max_examples=AT_ONCE[checked.starts_processes],
        deadline=None,
        database=None,
        phases=[Phase.generate] if checked.starts_processes else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(checked.inputs)
    def try_it(value: object) -> None:
        seen[checked.check(value)] += 1

    try:
        try_it()
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
        notes = "\n".join(getattr(error, "__notes__", []))
        failed.setdefault(
            f"{type(error).__name__} {where}", f"--- seed {seed}, {where}: {error!r:.3000}\n{notes:.3000}"
        )


if __name__ == "__main__":
    main()
