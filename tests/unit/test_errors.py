"""Every error and warning ends with the command that shows its section of docs/errors.md, and has that section."""

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch._utils import ExceptionWrapper

from ddp_patch import errors
from ddp_patch.__main__ import loaded
from ddp_patch.auditing.commands import commands
from ddp_patch.errors import DDPPatchError, DDPPatchWarning, InvalidOptionError, StateError, WorldError, message_of

CLASSES = [value for name in errors.__all__ if isinstance(value := getattr(errors, name), type)]
EACH = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
PAGE = Path(__file__).parents[2] / "docs" / "errors.md"

TEXT = "This happened. Do that."


def section(kind: type[Exception]) -> str:
    return f"Causes and remedies: python -m ddp_patch explain {kind.__name__}"


def test_all_errors_and_warnings_are_found() -> None:
    subclasses = {kind for base in (DDPPatchError, DDPPatchWarning) for kind in base.__subclasses__()}
    ours = {kind for kind in subclasses if kind.__module__ == errors.__name__}
    assert ours <= set(CLASSES)
    assert len(CLASSES) == len(errors.__all__) - 2  # two are functions


@EACH
def test_the_text_ends_with_the_section(kind: type[Exception]) -> None:
    assert str(kind(TEXT)) == f"{TEXT}\n{section(kind)}"
    assert str(kind()) == section(kind)
    assert message_of(kind(TEXT)) == TEXT
    assert kind(TEXT).args == (TEXT,)


@EACH
def test_the_section_has_a_heading(kind: type[Exception]) -> None:
    _, found, text = PAGE.read_text().partition(f"\n### {kind.__name__}\n")
    assert found
    said = text.partition("\n### ")[0].partition("\n## ")[0]
    assert re.match(r"\n[A-Z][^|]{30,}\.", said), "it says first what it means"
    if kind not in {DDPPatchError, DDPPatchWarning}:
        assert "\n| cause | what to do |\n| --- | --- |\n| " in said
        assert said.count("```python") == 1 or "\n> " in said, "it has an example, or quotes the message"
        raised = section(kind) in re.sub(r"\s+", " ", PAGE.read_text())
        assert raised or "\n> " in said, "the example shows the text"


@EACH
def test_the_command_line_explains_it(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    loaded(["explain", kind.__name__])()
    shown = capsys.readouterr().out
    assert shown.startswith(f"{kind.__name__}\n\n")
    assert not re.search(r"`|\]\(|^\||^## |<!--|\n\n\n", shown, re.MULTILINE), "Markdown"
    markup = r"\]\([^)]*\)|<!--.*?-->|^```\w+$|^\| cause \| what to do \|$|\\"
    section = re.split(
        "^##", PAGE.read_text().partition(f"\n### {kind.__name__}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]
    said = re.findall(r"\w+", re.sub(markup, "", section, flags=re.MULTILINE))
    assert re.findall(r"\w+", shown) == [kind.__name__, *said]


def test_the_command_is_in_the_help_and_refuses_what_it_cannot_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert "explain" in CliRunner().invoke(commands, ["--help"]).stdout
    assert CliRunner().invoke(commands, ["explain", "StateError"]).stdout.startswith("StateError\n")
    for names in ([], ["KeyError"], ["WorldError", "StateError"]):
        with pytest.raises(SystemExit) as ended:
            loaded(["explain", *names])()
        assert ended.value.code == 2
        assert "RankMismatchError" in capsys.readouterr().err


@EACH
def test_it_is_named_once_whatever_carries_it(kind: type[Exception]) -> None:
    """Pickled, copied, and as torch makes a worker's error anew: from the text that its traceback shows."""
    error = kind(TEXT)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), kind(str(error))):  # noqa: S301 - our own
        assert type(again) is kind
        assert str(again) == str(error)
    try:
        raise error
    except kind:
        wrapped: Any = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]  # torch's
    with pytest.raises(kind) as caught:
        wrapped.reraise()
    assert str(caught.value).startswith("Caught ")
    assert str(caught.value).count(section(kind)) == 1
    assert str(caught.value).rstrip().endswith(f"{TEXT}\n{section(kind)}")
    assert message_of(caught.value).endswith(TEXT)


def test_the_last_line_is_of_the_error_itself_whatever_it_is_derived_from_or_quotes() -> None:
    class MyError(WorldError):
        """A user's own."""

    assert str(MyError(TEXT)) == f"{TEXT}\n{section(WorldError)}"
    quoting = InvalidOptionError(f"It raised this: {StateError(TEXT)}")
    assert str(quoting).splitlines()[-1] == section(InvalidOptionError)
    assert str(StateError(f"Loading failed: {StateError('Inner.')} Try another.")).endswith(
        f"Try another.\n{section(StateError)}"
    )
    assert str(StateError("  indented")).startswith("  indented\n")
    assert message_of(ValueError(TEXT)) == TEXT


WARNINGS = [kind for kind in CLASSES if issubclass(kind, Warning)]


@pytest.mark.parametrize("kind", WARNINGS, ids=lambda kind: kind.__name__)
def test_a_warning_is_filtered_by_its_own_words(kind: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(TEXT, kind, stacklevel=1)
        warnings.filterwarnings("ignore", message=re.escape(TEXT))
        warnings.warn(TEXT, kind, stacklevel=1)
    (shown,) = caught
    assert str(shown.message) == f"{TEXT}\n{section(kind)}"
    assert section(kind) in warnings.formatwarning(shown.message, kind, "a.py", 1)
