"""Every relative link in README.md and docs/ leads to a file, and a translation has its original's links and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = sorted([*ROOT.glob("*.zh.md"), *(ROOT / "docs").glob("*.zh.md")])

name_of_page = pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)


def original_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def code_blocks(text: str) -> list[str]:
    """The fenced blocks without their comments, which a translation puts into its own language."""
    blocks = re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r" *#.*$", "", block, flags=re.MULTILINE) for block in blocks]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link.partition("#")[0] for link in links(page.read_text(encoding="utf-8"))]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_the_translated_pages_are_found() -> None:
    assert [page.name for page in TRANSLATIONS] == ["README.zh.md", "tour.zh.md"]


@name_of_page
def test_each_language_links_to_the_other_in_its_first_line(page: Path) -> None:
    original = original_of(page)
    assert page.read_text(encoding="utf-8").splitlines()[0] == f"[English]({original.name})"
    assert original.read_text(encoding="utf-8").splitlines()[0] == f"[简体中文]({page.name})"


@name_of_page
def test_a_translation_has_the_links_of_its_original(page: Path) -> None:
    """Except to pages that are translated themselves: there it stays in its language."""
    translated, original = (file.read_text(encoding="utf-8").partition("\n")[2] for file in (page, original_of(page)))
    assert sorted(link.replace(".zh.md", ".md") for link in links(translated)) == sorted(links(original))


@name_of_page
def test_a_translation_has_the_code_of_its_original(page: Path) -> None:
    translated, original = page.read_text(encoding="utf-8"), original_of(page).read_text(encoding="utf-8")
    assert len(code_blocks(original)) > 5
    assert code_blocks(translated) == code_blocks(original)


@name_of_page
def test_a_translation_has_the_headings_rows_and_names_of_its_original(page: Path) -> None:
    translated, original = page.read_text(encoding="utf-8"), original_of(page).read_text(encoding="utf-8")
    for pattern in (r"^#+ ", r"^\|"):
        assert len(re.findall(pattern, translated, re.M)) == len(re.findall(pattern, original, re.M)), pattern
    names = r"(?<!`)`([^`\n]+)`(?!`)"  # files, fields, routes and commands within the text
    assert sorted(re.findall(names, translated)) == sorted(re.findall(names, original))
