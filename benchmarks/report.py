"""Results of the suites -> one file each, and from the newest files the page docs/measured/benchmarks.md.

python -m benchmarks.report docs/measured/benchmarks.md
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
SCHEMA = 1
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "deepspeed", "numpy", "lightning")
WHY: dict[str, str] = {
    "C1": "in eager mode all contenders call the same kernels on the same weights, and what is not kernels is a hundredth of this step: a tuned loop "
    "and ours end up within the noise of each other. What a peer's defaults lose here is GPT-2's activation in eight operations and an update that "
    "is not fused; Trainer has the fused update by default by now, so its distance is smaller than it was.",
    "C2": "the profile's rest, largest first: the gradient norm, which is exact and names a parameter that is not finite; the loss as an "
    "autograd function of Python; every tenth step the log. Lightning, tuned, logs nothing.",
    "C4": "nine tenths of it are the tokenizer, which is the bound; the rest is reading the JSON, the hashes by which a document is found again and kept out of the "
    "other split, and the ids, which the tokenizer hands out as a list of Python's numbers only. The script beside it chains its lists by now, where it "
    "used to add them up, and spends most of its time in the same tokenizer, whose own time, on two threads that share a core, differs by a third from one "
    "call to the next.",
    "C5": "half of the time is the conversion of the ids to 64 bits, which is a copy through memory and which nanoGPT makes as well; the rest is torch's "
    "DataLoader, once a batch.",
    "C8": "the disk of this machine took the same raw bytes at 0.9 to 2.1 GB/s in the runs of one day, and raw write and save are minutes apart. At the faster end "
    "what a save does beside writing, copies and checksums, no longer hides behind the disk.",
    "C11": "nearly all of it is imports that Trainer shares: torch and transformers' models.",
    "C12": "what C2 has, and one message more in each step, in which the processes agree whether to stop.",
    "C13": "small products use a core less well than large ones, so that time grows less than the operations do.",
}
"""Figure -> why it falls short of its goal, found by profiling; shown where it does."""


def header(kind: str) -> dict[str, Any]:
    """What every file of results begins with."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "time": f"{datetime.now(UTC):%H:%M:%S}",
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": machine(),
        "versions": versions(),
        "peers": peers(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    import torch

    info: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    flags = info.get("flags", "").split()
    found: dict[str, Any] = {
        "cpu": info.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "units": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


def versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def peers() -> dict[str, str | None]:
    """Of what is run from BENCH_PEERS, a hash of the file that is run; None: absent."""
    import xxhash

    folder = Path(os.environ.get("BENCH_PEERS", "/nowhere"))
    files = {
        "nanoGPT": "nanoGPT/train.py",
        "litgpt": "litgpt/litgpt/pretrain.py",
        "run_clm_no_trainer": "transformers/examples/pytorch/language-modeling/run_clm_no_trainer.py",
    }
    return {
        name: xxhash.xxh3_128((folder / file).read_bytes()).hexdigest() if (folder / file).is_file() else None
        for name, file in files.items()
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write one run's results; of a day and commit, a later run takes the place of an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result['kind']}-{result['date']}-{result['commit']}.json"
    file.write_text(json.dumps(_rounded(result), indent=1) + "\n")
    return file


def beside_others(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With what else was measured at this commit on this day; what both have is the later one's."""
    file = folder / f"{result['kind']}-{result['date']}-{result['commit']}.json"
    if not file.exists():
        return result
    earlier = json.loads(file.read_text())
    if earlier["machine"] != json.loads(json.dumps(result["machine"])) or earlier["complete"] != result["complete"]:
        return result
    raced, mine = set(result["races"]), {row["id"] for row in result["figures"]}
    kept = [row for row in earlier["figures"] if row["id"] not in mine]
    order = list(dict.fromkeys(row["id"] for row in earlier["figures"]))
    both = [*kept, *result["figures"]]
    result["figures"] = sorted(both, key=lambda row: order.index(row["id"]) if row["id"] in order else len(order))
    for key in ("races", "samples", "failed", "seconds_of"):
        kept_of = {k: v for k, v in earlier[key].items() if not (key == "failed" and k in result["seconds_of"])}
        result[key] = kept_of | result[key]
    others = [why for why in earlier["void_because"] if why.split(":")[0] not in raced]
    result["again"] = [
        *earlier.get("again", ()),
        *(why for why in earlier["void_because"] if why.split(":")[0] in raced),
    ]
    result["void_because"] = [*others, *result["void_because"]]
    result["void"] = bool(result["void_because"])
    result["seconds"] = sum(result["seconds_of"].values())
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value


def newest(folder: Path, kind: str) -> dict[str, Any] | None:
    """The last whole run of a suite; a void one only where there is no other."""
    found = [json.loads(file.read_text()) for file in folder.glob(f"{kind}-*.json")]
    ranked = sorted(found, key=lambda result: (result["complete"], not result["void"], result["date"], result["time"]))
    return ranked[-1] if ranked else None


def write_page(folder: Path, page: Path) -> None:
    lines = [
        "# Benchmarks",
        "",
        "<!-- generated by python -m benchmarks.report: no number is typed by hand -->",
        "",
        "Every contender is a process of its own that trains when it is handed a token: the same weights, the same tokens in the same order,",
        "AdamW with the same numbers. Before anything is timed, the losses and gradient norms of five steps must agree with those of a hand-written",
        "loop. The contenders take turns, in another order each round; ours runs twice, and a run in which it is not as fast as itself is void.",
        "A ratio is ours / theirs, of medians, with a bootstrap 95 % interval over the rounds: below 1 we are faster where time is compared, above 1 where",
        "speed is. *Default* is a peer as its documentation runs it, *tuned* with all that it offers for this machine.",
        "",
    ]
    for kind, title, command in (("cpu", "On a CPU", "make bench"), ("gpu", "On a GPU", "make bench-gpu")):
        lines += [f"## {title}", ""]
        result = newest(folder, kind)
        if result is None:
            lines += [f"Not measured yet: `{command}`.", ""]
        else:
            lines += section(result, command)
    page.write_text("\n".join(lines).rstrip() + "\n")


def section(result: dict[str, Any], command: str) -> list[str]:
    """The part of the page about one suite."""
    where = result["machine"]
    name = (
        where["gpu"]["name"]
        if "gpu" in where
        else f"{where['cores']} cores of {where['cpu']} ({', '.join(where['units'])})"
    )
    known = ", ".join(f"{package} {version}" for package, version in result["versions"].items() if version)
    lines = [
        f"`{command}`, {result['date']}, commit {result['commit']}{' with changes' if result['changed'] else ''}, {name}, {known}; load average "
        f"{result['load']['before'][0]:.1f} before, {result['load']['after'][0]:.1f} after; {result['seconds'] / 60:.1f} minutes.",
        "",
    ]
    for again in result.get("again", ()):
        lines += [f"Measured again by itself, with everybody in it, because its control had failed: {again}.", ""]
    if result["void"]:
        lines += [f"**Void**: {'; '.join(result['void_because'])}.", ""]
    noise = {job: race["ours_over_ours"] for job, race in result["races"].items() if race.get("ours_over_ours")}
    if noise:
        lines += [
            "Ours over ours: "
            + ", ".join(f"{job} {n[0]:.3f} ({n[1]:.3f} to {n[2]:.3f})" for job, n in noise.items())
            + ".",
            "",
        ]
    lines += ["| | figure | contender | median | ours / theirs | 95 % | goal | |", "|---|---|---|---|---|---|---|---|"]
    for row in result["figures"]:
        interval = (
            f"{row['low']:.3f} to {row['high']:.3f}" if row["ratio"] is not None and row["low"] != row["high"] else ""
        )
        verdict = "" if row["met"] is None else "met" if row["met"] else "**not met**"
        note = f" ({row['note']})" if row["note"] else ""
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(
            f"| {row['id']} | {row['what']} | {row['contender']}{note} | {row['median']:.4g} {row['unit']} | {ratio} | {interval} | "
            f"{row['goal'] or ''} | {verdict} |"
        )
    lines.append("")
    missed = sorted({row["id"] for row in result["figures"] if row["met"] is False}, key=lambda id: (len(id), id))
    for id in missed:
        lines += [f"{id}: {WHY[id]}" if id in WHY else f"{id}: the reason is not known yet.", ""]
    away: dict[str, str] = {}
    for job, race in [*result["races"].items(), *result["samples"].items()]:
        if isinstance(race, dict):
            for reason in ("absent", "failed"):
                for contender, why in (race.get(reason) or {}).items():
                    away[f"{contender} ({job}, {reason})"] = why
    for id, why in result["failed"].items():
        away[f"{id} (failed)"] = why
    if away:
        lines += ["Not in the table: " + "; ".join(f"{who}: {why}" for who, why in away.items()) + ".", ""]
    return lines


if __name__ == "__main__":
    write_page(RESULTS, Path(sys.argv[1]))
