"""What the README tells a user to type exists, and what exists is in the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pask.paths import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
SNAKEMAKE = [command for command in COMMANDS if command.startswith("snakemake ")]


def test_there_are_commands_to_check() -> None:
    assert len(SNAKEMAKE) >= 5
    assert "make all" in COMMANDS
    assert "make test" in COMMANDS


@pytest.mark.parametrize("command", SNAKEMAKE)
def test_every_snakemake_command_plans(command: str) -> None:
    program = Path(sys.executable).parent / "snakemake"
    done = subprocess.run(
        [program, *command.split()[1:], "--dry-run", "--nolock"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_make_target_exists() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = re.findall(r"`make ([a-z]+)`", README)
    targets += [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_command_of_the_program_is_described() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pask", "--help"], capture_output=True, text=True, check=True
    )
    listed = re.search(r"COMMAND\n((?:    .*\n)+)", done.stdout)
    assert listed is not None
    names = re.findall(r"^    ([a-z]+)", listed.group(1), flags=re.MULTILINE)
    assert len(names) >= 9
    for name in names:
        assert f"`pask {name}" in README, name


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (PROJECT / target).exists(), target


def test_manners() -> None:
    """The project names no machine, folder or package index of anybody's."""
    for path in [PROJECT / "README.md", PROJECT / "Makefile", PROJECT / "pyproject.toml"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/home/|/root/|/work/|pypi\.org|pythonhosted", text), path


def test_the_python_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[1] == "b' id' (key, required_key, whole/free, near)"
