"""acc-lm completion: what bash offers after it has read the printed script."""

from __future__ import annotations

import subprocess

import pytest

from acc_lm.cli import VERBS, main

TYPED = {
    "rec": {"recipes", "recipe"},
    "data sh": {"show"},
    "data show chat_own": {"chat_own_files_lora"},
    "data show --ht": {"--html"},
    "train data.max": {"data.max_tokens=", "data.max_lossy_share="},
    "launch fsdp2_": {"fsdp2_grad_op", "fsdp2_offload", "fsdp2_tensor_parallel"},
    "launch fsdp2 pretrain_syn": {"pretrain_synthetic"},
    "doctor --config_file multi": {
        "multi_node_ddp",
        "multi_node_hsdp",
        "multi_node_deepspeed_zero3",
        "multi_node_sequence_parallel",
        "multi_node_fsdp2_tensor_parallel",
    },
    "recipes --show quick": {"quickstart"},
    "path hs": {"hsdp"},
}


def test_bash_completes_verbs_options_recipes_configs_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for typed in TYPED:
        words = ["acc-lm", *typed.split()]
        script += f"COMPREPLY=(); COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_acc_lm\n"
        script += 'echo "offered: ${COMPREPLY[*]}"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    offered = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("offered:")]
    assert dict(zip(TYPED, offered, strict=True)) == TYPED


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_names_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verbs in VERBS.values() for verb in verbs)
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
