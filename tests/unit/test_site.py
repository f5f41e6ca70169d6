"""The pages make up one site: each is in the navigation, links lead somewhere, every public name is described."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import CHECKOUT

import ddp_patch
from ddp_patch import samplers, testing

DOCS = CHECKOUT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MARKDOWN = [*CHECKOUT.glob("*.md"), *PAGES]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "`code`", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What can be linked to in a page: its headings, as Python-Markdown and GitHub name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


def links() -> Iterator[tuple[str, str, str]]:
    for page in MARKDOWN:
        for target, anchor in LINK.findall(prose(page)):
            yield page.relative_to(CHECKOUT).as_posix(), target, anchor


@pytest.mark.parametrize(("page", "target", "anchor"), sorted(set(links())))
def test_every_link_leads_somewhere(page: str, target: str, anchor: str) -> None:
    path = (CHECKOUT / page).parent / target if target else CHECKOUT / page
    if target.endswith((".svg", ".png")):  # the anchor says in which colour scheme it is shown
        assert path.is_file()
        assert anchor in {"", "only-light", "only-dark"}
    else:
        assert path.exists()
        assert anchor == "" or anchor in anchors(path)


def test_every_page_is_in_the_navigation_once() -> None:
    _, _, navigation = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:\n")
    navigation, _, rest = navigation.partition("\nnot_in_nav:")
    left_out = re.findall(r"^  (\S+\.md)$", rest.partition("\nexclude_docs:")[0], re.MULTILINE)
    named = re.findall(r"- (?:.*: )?(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(named + left_out) == [page.name for page in PAGES]
    assert len(named) <= 16 + 1  # and the changelog


def test_every_picture_is_shown() -> None:
    shown = {target for _, target, _ in links()}
    assert {path.name for path in DOCS.glob("*.svg")} <= shown


def test_every_public_name_is_in_the_reference() -> None:
    """The page lists its members; the errors are listed by their module."""
    described = set(re.findall(r"^ +- (\w+)$", (DOCS / "options.md").read_text(), re.MULTILINE))
    assert "::: ddp_patch.errors" in (DOCS / "options.md").read_text()
    public = {*ddp_patch.__all__, *samplers.__all__, *testing.__all__} - set(ddp_patch.errors.__all__)
    assert public - described == set()


def test_every_option_is_in_the_table_with_its_default_in_the_order_of_the_signature() -> None:
    _, _, section = (DOCS / "options.md").read_text().partition("\n## The keywords\n")
    told = re.findall(r"^\| `(.*?)` \| ", section.partition("\n### ")[0], re.MULTILINE)
    parameters = list(inspect.signature(ddp_patch.patch_dataloader_to_ddp).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    expected = [
        name if default is None else f"{name}={default!r}".replace("'", '"') for name, default in defaults.items()
    ]
    assert told == expected
