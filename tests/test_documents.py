"""The documents: short, about what is there, and with links, names and commands that lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import draccus
import pytest
import yaml

from helpers.paths import ROOT
from levanter_diloco import cli
from levanter_diloco.options.config import DiLoCoConfig

PACKAGE = ROOT / "levanter_diloco"

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            path
            for folder in (".github", "configs", "levanter_diloco", "scripts", "tests")
            for path in ROOT.glob(f"{folder}/**/*.md")
        ),
    ]
)

FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)

GENERATED = re.compile(r"^<!-- (\w+) -->\n.*?^<!-- /\1 -->\n", re.MULTILINE | re.DOTALL)
"""What a command of ours writes into a document: no part of its length."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(path: Path) -> list[str]:
    return GENERATED.sub("", path.read_text()).splitlines()


def code(path: Path) -> list[str]:
    """The lines of fenced and of indented blocks; a line that ends in a backslash goes on."""
    text = path.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.*)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()


def anchors(path: Path) -> set[str]:
    """The headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def imported_folders(folder: Path) -> set[str]:
    """What a folder at the top of the package imports of its neighbours, names in strings included."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        above = "." * (1 + len(path.relative_to(PACKAGE).parts) - 1)
        text = path.read_text()
        found |= set(re.findall(rf"^\s*from {re.escape(above)}(\w+)[\w.]* import", text, re.MULTILINE))
        found |= set(re.findall(r'"levanter_diloco\.(\w+)', text))
    return found - {folder.name}


def test_documents_are_found():
    # The tests below would pass on none.
    found = set(map(name, DOCUMENTS))
    assert {"README.md", ".github/CONTRIBUTING.md", ".github/CHANGELOG.md", "configs/README.md"} <= found
    assert [name(folder) for folder in FOLDERS if not (folder / "README.md").is_file()] == []
    assert "levanter-diloco plan --params 10e9" in "\n".join(code(PACKAGE / "commands/plan/README.md"))
    assert imported_folders(PACKAGE / "fragments") >= {"axes", "errors"}


def test_readme_stays_short():
    assert len(lines(ROOT / "README.md")) <= 170


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_readme_of_a_folder_is_short_and_names_every_module(folder: Path):
    written = lines(folder / "README.md")
    assert len(written) <= 60
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    missing = {module for module in modules if f"`{module}`" not in "\n".join(written)}
    assert not missing


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.parent == PACKAGE], ids=name)
def test_readme_of_a_folder_says_what_it_imports(folder: Path):
    text = " ".join(lines(folder / "README.md"))
    said = re.findall(r"(May import|Imports nothing)([^.]*)\.", text)
    assert len(said) == 1
    assert set(re.findall(r"`(\w+)`", said[0][1])) == imported_folders(folder)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_prose_is_wrapped(path: Path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_to_files_and_headings(path: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text().replace("\n", " ")):
        if link.startswith("https://"):
            continue
        target, _, heading = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert not heading or heading in anchors(file), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_and_modules_that_are_named_exist(path: Path):
    text = path.read_text()
    for file in re.findall(r"(?<![\w/.-])((?:configs|scripts|tests)/[\w/]+\.(?:yaml|py|sh|json))", text):
        assert (ROOT / file).is_file(), file
    for dotted in re.findall(r"\blevanter_diloco((?:\.[a-z_]\w*)+)", text):
        place = PACKAGE.joinpath(*dotted.split(".")[1:])
        assert place.is_dir() or place.with_suffix(".py").is_file(), dotted


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_no_document_names_a_place_on_one_machine(path: Path):
    assert not re.findall(r"(?<![\w.-])/(?:home|root|work|tmp|Users|mnt)/", path.read_text())


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_name_options_that_exist(path: Path):
    for line in code(path):
        words = line.split("#")[0].removeprefix("$ ").split()
        while words and (words[0] in (".venv/bin/python", "python") or "=" in words[0]):
            words = words[1:]
        program = words[0].removeprefix(".venv/bin/") if words else ""
        if program.startswith("scripts/"):
            sources = [ROOT / program]
        elif program == "levanter-diloco" and words[1] != "COMMAND":
            assert words[1] in {**cli.PROGRAMS, **cli.TOOLS}, line
            sources = source_of(words[1])
        else:
            continue
        text = "\n".join(source.read_text() for source in sources)
        given = words[: words.index("--")] if "--" in words else words
        for option in re.findall(r"(?<!\S)\[?--([\w-]+)(?=[\s\]]|$)", " ".join(given)):
            assert re.search(rf"\b{option.replace('-', '[-_]')}\b", text), f"{option}: {line}"


def source_of(command: str) -> list[Path]:
    """The files that know the options of a command."""
    if command in cli.PROGRAMS:
        return [PACKAGE / "options/reading.py"]
    module = PACKAGE.joinpath(*cli.TOOLS[command].split(".")[1:]).with_suffix(".py")
    inside = module.parent != PACKAGE / "commands"
    return [*(module.parent.glob("*.py") if inside else [module]), PACKAGE / "commands/flags.py"]


def test_yaml_of_the_readme_is_read():
    [block] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    options = yaml.safe_load(block)["trainer"]["diloco"]
    assert len(options) == 6
    assert draccus.decode(DiLoCoConfig, options).overlap_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("document", [".github/CONTRIBUTING.md", "levanter_diloco/algorithm/README.md"])
def test_python_in_a_document_runs(document: str):
    # In a process of its own: what it registers would be known to the tests that follow.
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL))
    assert "register" in program
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
