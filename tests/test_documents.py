"""Links between the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if p.is_file()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#\s]+)\)", document.read_text(encoding="utf-8"))
    gone = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not gone


def test_there_are_links():
    assert sum("](" in p.read_text(encoding="utf-8") for p in DOCUMENTS) >= 3
