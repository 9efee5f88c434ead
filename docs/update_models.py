"""Put what becomes of every causal type of transformers into docs/reference/models.md.

python docs/update_models.py          looks at all of them, some minutes on one core
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    import conftest  # imports what the forked processes need
    from model_zoo import TYPES, Found, look_at
    from processes import run_everywhere
    from tqdm import tqdm

    from acc_lm.studies.tables import machine_line, replace_block

    assert conftest
    found: list[Found] = [run_everywhere(lambda name=name: look_at(name))[0] for name in tqdm(TYPES)]
    trains = [each for each in found if each.outcome == "trains" and not each.wrong]
    others = [each for each in found if each.outcome != "trains"]
    wrong = [each for each in found if each.wrong]
    lines = [
        f"`python docs/update_models.py`: {len(found)} types, {len(trains)} trained as transformers trains them, "
        f"{sum(each.outcome == 'refused' for each in found)} refused, {sum(each.outcome == 'not built' for each in found)} not built, "
        f"{len(wrong)} that differ.",
        "",
        machine_line(),
        "",
        "| type | attention | loss | several documents in a row | LoRA | FLOPs of a token | experts |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{each.model_type}` | {each.attention} | {each.loss} | {_yes(each.packs)} | {_yes(each.adapters)} | "
            f"{'known' if each.flops == 'known' else 'unknown'} | {each.experts.partition(';')[0]} |"
            for each in trains
        ),
        "",
        "| type | | why |",
        "|---|---|---|",
        *(f"| `{each.model_type}` | {each.outcome} | {each.why.replace('|', ' ')} |" for each in others),
    ]
    replace_block(ROOT / "docs/reference/models.md", "models", "\n".join(lines))
    for each in wrong:
        print(f"{each.model_type}: {each.wrong}", file=sys.stderr)
    sys.exit(bool(wrong))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    main()
