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
PAGES = [
    *(PROJECT / name for name in ("README.md", "baselines/README.md", "kernels/README.md")),
    PROJECT / "results/README.md",
    *sorted((PROJECT / "results/reference").glob("*.md")),
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


def _anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: each heading as GitHub spells it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_configs_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"\s", "", page.read_text(encoding="utf-8"))  # a name may be broken over lines
    for name in re.findall(r"configs/[\w.-]+\.(?:yaml|json)", text):
        assert (PROJECT / name).exists(), name


def test_manners() -> None:
    """The project names no machine, folder or package index of anybody's."""
    for path in [*PAGES, PROJECT / "Makefile", PROJECT / "pyproject.toml"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/home/|/root/|/work/|pypi\.org|pythonhosted", text), path


def test_the_python_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[1] == "b' id' (key, required_key, whole/free, near)"
