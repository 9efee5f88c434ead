"""Results of the suites: one file per run, and the page docs/measured/benchmarks.md made from the newest files.

python -m benchmarks.report docs/measured/benchmarks.md
"""

from __future__ import annotations

import contextlib
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
PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "tokenizers",
    "tiktoken",
    "deepspeed",
    "numpy",
    "lightning",
)
WHY: dict[str, str] = {
    "C1": "in eager mode all contenders call the same kernels on the same weights, and everything else is a hundredth of this step, so a tuned loop "
    "and ours are equal within the noise. A peer's defaults lose time to GPT-2's activation in eight operations and to an update that is not fused. "
    "Trainer now fuses the update by default, so its distance is smaller than before.",
    "C2": "the rest of the profile, largest first: the gradient norm, which is exact and names a non-finite parameter; the loss as an "
    "autograd function in Python; the log of every tenth step. Lightning, tuned, logs nothing.",
    "C4": "tiktoken takes two thirds of the time; the rest is reading the JSON, the hashes that identify a document and keep it out of the other split, "
    "and tokenizers' own ids of a sample, with which tiktoken's are compared.",
    "C5": "half of the time converts the ids to 64 bits, a copy through memory that nanoGPT makes as well; the rest is torch's DataLoader, once per batch.",
    "C11": "nearly all of the time is imports that Trainer has as well: torch and transformers' models.",
    "C12": "as C2, plus one message per step in which the processes agree whether to stop.",
    "C13": "small matrix products use a core less well than large ones, so time grows less than the number of operations.",
}
"""Reasons, found by profiling, why a figure misses its goal; shown on the page when it does."""
RENAMED = {
    "of a step beside": "of a step next to",
    "of one core's fp32 matrix product,": "share of one core's speed in an fp32 matrix product,",
    "ours above the bare loop": "ours minus bare loop",
    "peak memory above what was there before the model,": "peak memory in addition to the memory at the start,",
    "a checkpoint's speed beside a raw write": "speed of a checkpoint compared with a raw write",
    "what a save behind the training costs: docs/reliability.md": "cost of a save in the background: docs/promises/reliability.md",
    "batches, beside after none": "batches, compared with after none",
    "slope of a step's time over its tokens, log-log: 1 is proportional": "slope of step time over tokens, log-log (1: proportional)",
    "growth of a step's time over that of its operations,": "growth of step time / growth of operations,",
    "transformers' way": "transformers",
    "of the time of ours, allowed": "times as long as ours again, allowed",
}
"""Labels of results from before a renaming -> today's labels. The files of results stay as they were measured."""


def header(kind: str) -> dict[str, Any]:
    """First entries of every file of results."""
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
        "peer_commits": peer_commits(),
    }


def _git(*arguments: str, folder: Path = ROOT) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
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


PEER_FILES = {
    "nanoGPT": "nanoGPT/train.py",
    "litgpt": "litgpt/litgpt/pretrain.py",
    "run_clm_no_trainer": "transformers/examples/pytorch/language-modeling/run_clm_no_trainer.py",
}


def peers() -> dict[str, str | None]:
    """Hash of the file that is run of each peer in PEERS, or the version of its package; None: absent."""
    from importlib.metadata import PackageNotFoundError, version

    import xxhash

    folder = Path(os.environ.get("PEERS", "/nowhere"))
    found: dict[str, str | None] = {}
    for name, file in PEER_FILES.items():
        found[name] = xxhash.xxh3_128((folder / file).read_bytes()).hexdigest() if (folder / file).is_file() else None
    if found["litgpt"] is None:
        with contextlib.suppress(PackageNotFoundError):
            found["litgpt"] = version("litgpt")
    return found


def peer_commits() -> dict[str, str]:
    """Commit of each peer in PEERS that is a clone."""
    folder = Path(os.environ.get("PEERS", "/nowhere"))
    found = {name: folder / file.split("/")[0] for name, file in PEER_FILES.items()}
    return {
        name: commit
        for name, clone in found.items()
        if (clone / ".git").exists() and (commit := _git("rev-parse", "HEAD", folder=clone))
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write the results of one run; a later run of the same day and commit replaces an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result['kind']}-{result['date']}-{result['commit']}.json"
    file.write_text(json.dumps(_rounded(result), indent=1) + "\n")
    return file


def merge_results(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Merge with the results of this commit and day on disk; figures that both have are taken from `result`."""
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
    """Newest complete run of a suite; a void one only if there is no other."""
    found = [json.loads(file.read_text()) for file in folder.glob(f"{kind}-*.json")]
    ranked = sorted(found, key=lambda result: (result["complete"], not result["void"], result["date"], result["time"]))
    return ranked[-1] if ranked else None


def write_page(folder: Path, page: Path) -> None:
    lines = [
        "# Benchmarks",
        "",
        "<!-- generated by python -m benchmarks.report: no number is typed by hand -->",
        "",
        "After this page you know how fast this project is next to its peers on one machine, and which of its goals it misses and why.",
        "",
        "**Same work.** Each contender is a separate process that trains only while it holds a token. All train the same weights on the same tokens in",
        "the same order, with the same AdamW settings. Before anything is timed, the losses and gradient norms of the first five steps must agree with",
        "those of a hand-written loop.",
        "",
        "**A/A control.** The contenders take turns, in another order each round. Ours takes part twice (*ours*, *ours again*); a run in which the two",
        "copies differ by more than 2 % (on a GPU 1 %) is void.",
        "",
        "| term | meaning |",
        "|---|---|",
        "| ours / theirs | ratio of medians. Below 1 ours is better where time or memory is compared, above 1 where speed is |",
        "| 95 % | bootstrap interval of that ratio over the rounds |",
        "| a peer's name alone | the peer as its documentation runs it |",
        "| tuned | the same with everything that it offers for this machine |",
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


def _renamed(label: str) -> str:
    for earlier, today in RENAMED.items():
        label = label.replace(earlier, today)
    return label


def _line_of_peers(result: dict[str, Any]) -> list[str]:
    """Line about the peers that are no libraries: which were absent, or which version of each took part."""
    if result["kind"] != "cpu":
        return []
    known = result["peers"] | {"Lightning": result["versions"]["lightning"]}
    absent = [name for name, version in known.items() if version is None]
    commits = {name: commit[:7] for name, commit in result.get("peer_commits", {}).items()}
    present = [f"{name} {commits.get(name, version[:8])}" for name, version in known.items() if version is not None]
    missing = f"**Absent: {', '.join(absent)}.** " if absent else ""
    return [f"{missing}Peers, by commit, version or hash: {', '.join(present) or 'none'}.", ""]


def section(result: dict[str, Any], command: str) -> list[str]:
    """Part of the page about one suite."""
    where = result["machine"]
    name = (
        where["gpu"]["name"]
        if "gpu" in where
        else f"{where['cores']} cores of {where['cpu']} ({', '.join(where['units'])})"
    )
    known = ", ".join(f"{package} {version}" for package, version in result["versions"].items() if version)
    lines = [
        *_line_of_peers(result),
        f"`{command}`, {result['date']}, commit {result['commit']}{' with changes' if result['changed'] else ''}, {name}, {known}; load average "
        f"{result['load']['before'][0]:.1f} before, {result['load']['after'][0]:.1f} after; {result['seconds'] / 60:.1f} minutes.",
        "",
    ]
    if result.get("again"):
        lines += ["Measured again on their own, with all contenders, because the A/A control had failed:", ""]
        lines += [*(f"- {_renamed(again)}" for again in result["again"]), ""]
    if result["void"]:
        lines += [f"**Void**: {'; '.join(map(_renamed, result['void_because']))}.", ""]
    noise = {job: race["ours_over_ours"] for job, race in result["races"].items() if race.get("ours_over_ours")}
    if noise:
        lines += [
            "A/A control, ours / ours again: "
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
        note = f" ({_renamed(row['note'])})" if row["note"] else ""
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(
            f"| {row['id']} | {_renamed(row['what'])} | {_renamed(row['contender'])}{note} | {row['median']:.4g} {row['unit']} | {ratio} | {interval} | "
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
