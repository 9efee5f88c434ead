"""`acc-lm completion`: print a script that lets bash or zsh complete verbs, options, recipes, configs and keys."""

from __future__ import annotations

import argparse
import importlib

PREAMBLE = {
    "bash": '_acc_lm_recipes() {{ compgen -W "{recipes}" -- "$1"; }}\n_acc_lm_configs() {{ compgen -W "{configs}" -- "$1"; }}\n',
    "zsh": "_acc_lm_recipes() {{ compadd -- {recipes} }}\n_acc_lm_configs() {{ compadd -- {configs} }}\n",
}
COMPLETED_BY = {
    "overrides": "_acc_lm_recipes",
    "config": "_acc_lm_recipes",
    "recipe": "_acc_lm_recipes",
    "show": "_acc_lm_recipes",
    "config_file": "_acc_lm_configs",
    "name": "_acc_lm_configs",
}
"""Function that completes the value of an argument, by the argument's name."""

PASSED_ON = {
    "train": ("overrides", "--dry-run", "--eval-only", "--print-config"),
    "launch": ("config_file", "overrides"),
}
"""Arguments of the verbs that pass theirs on, to train.py and to accelerate launch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(PREAMBLE), help='e.g. eval "$(acc-lm completion bash)" in ~/.bashrc')


def run(known: argparse.Namespace) -> int:
    import shtab

    from acc_lm.config.project import project_folder
    from acc_lm.config.reference import describe_keys

    folder = project_folder()
    recipes = sorted(file.stem for file in (folder / "recipes").glob("*.yaml"))
    configs = sorted(file.stem for file in (folder / "accelerate_configs").glob("*.yaml"))
    keys = [f"{key}=" for key, *_ in describe_keys() if "[" not in key]
    preamble = PREAMBLE[known.shell].format(recipes=" ".join([*recipes, *keys]), configs=" ".join(configs))
    print(shtab.complete(_whole_parser(), known.shell, preamble={known.shell: preamble}))  # type: ignore[arg-type]
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """One parser with every verb, which a normal start does not build."""
    from acc_lm.cli import VERBS

    parser = argparse.ArgumentParser(prog="acc-lm")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for verb, line in (pair for group in VERBS.values() for pair in group.items()):
        added = verbs.add_parser(verb, help=line)
        module = importlib.import_module(f"acc_lm.cli.{verb.replace('-', '_')}")
        if verb in PASSED_ON:
            for name in PASSED_ON[verb]:
                added.add_argument(name, nargs="*" if name == "overrides" else None)
        else:
            module.add_arguments(added)
        _name_completions(added)
    return parser


def _name_completions(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _name_completions(inner)
        elif action.dest in COMPLETED_BY:
            function = COMPLETED_BY[action.dest]
            action.complete = {"bash": function, "zsh": function}  # type: ignore[attr-defined]
