"""Bad input to every public function, told at once by an error of this package, which ends with where to read on."""

import copy
import operator
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from messages import raises
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from zoo import Indices, as_it_is

from ddp_patch import (
    DDPBatchSamplerWrapper,
    DDPPatchError,
    DDPSamplerWrapper,
    assert_loaders_patched,
    check_loaders_is_patched,
    errors,
    extract_loader_parameters,
    gather_in_order,
    iter_with_mask,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)
from ddp_patch.__main__ import loaded
from ddp_patch.auditing import audit
from ddp_patch.auditing.commands import commands
from ddp_patch.errors import DDPPatchWarning, InvalidOptionError, NotALoaderError, StateError, WorldError, message_of
from ddp_patch.testing import run_ranks

E: dict[str, Any] = {"rank": 0, "num_replicas": 2}
Call = Callable[[], Any]
# Arguments of other types than the signatures say are what is tested.
by_wrapper: Any = DDPSamplerWrapper
by_batches: Any = DDPBatchSamplerWrapper
audited: Any = audit
ran: Any = run_ranks


def given() -> DataLoader[Any]:
    return DataLoader(Indices(8), 2, shuffle=True, collate_fn=as_it_is)


def patched(**options: Any) -> Any:
    return patch_dataloader_to_ddp(given(), **(E | options))


def alone(**options: Any) -> Any:
    return patch_dataloader_to_ddp(given(), **options)


def after_a_pass() -> Any:
    loader = patch_dataloader_to_ddp(given(), rank=0, num_replicas=1)
    list(loader)
    return loader


def one_argument(rank: int) -> Any:
    return given()


def three_arguments(rank: int, world_size: int, more: int) -> Any:
    return given()


def returns_none(rank: int, world_size: int) -> Any:
    return None


def local() -> Callable[..., int]:
    def within(rank: int, world_size: int) -> int:
        return rank

    return within


NAN = float("nan")
WHOLES = [torch.tensor(3.5), torch.tensor([1, 2]), torch.tensor(True), "3", 3.5, [3], np.array([3, 4]), np.float64(3)]
NO_COUNTS: list[Any] = [True, 1.0, "1", -1, 99, np.bool_(True), *WHOLES]
FLAGS: list[Any] = ["no", 2, 0, None, [True], torch.tensor(True)]
SECONDS: list[Any] = ["x", None, True, NAN, -1, [1]]
NO_LOADERS: list[Any] = [None, 3, "x", [DataLoader(Indices(3))], DataLoader, range(3)]
EMPTY: list[Any] = [[], {}, (), [[]], {"a": []}, {"a": {"b": ()}}]
OPTIONS: dict[str, list[Any]] = {
    "seed": [-1, True, *WHOLES],
    "rank": [2, -1, None, *WHOLES],
    "num_replicas": [0, -1, None, *WHOLES],
    "timeout": [0, *SECONDS],
    "uneven": [None, 3, ["pad"], "padd"],
}


def calls() -> list[tuple[type[DDPPatchError], str, Call]]:
    table: list[tuple[type[DDPPatchError], str, Call]] = []

    def add(error: type[DDPPatchError], name: str, call: Callable[..., Any], values: list[Any]) -> None:
        table.extend((error, f"{name} {number}", partial(call, value)) for number, value in enumerate(values))

    for option, values in OPTIONS.items():
        add(InvalidOptionError, f"patch {option}", lambda value, option=option: patched(**{option: value}), values)
        add(InvalidOptionError, f"wrapper {option}", lambda value, o=option: by_wrapper([1], **E | {o: value}), values)
    add(InvalidOptionError, "patch fingerprint", lambda value: patched(fingerprint=value), ["files", 3, [len], True])
    add(InvalidOptionError, "patch process_group", lambda value: alone(process_group=value), ["x", 3, True, [0, 1]])
    add(InvalidOptionError, "patch device_mesh", lambda value: alone(device_mesh=value), [3, "dp", ("dp",)])
    for wrapper in (by_wrapper, by_batches):
        add(InvalidOptionError, f"{wrapper.__name__} shuffle", lambda value, w=wrapper: w([[0]], value, **E), FLAGS)
        add(InvalidOptionError, f"{wrapper.__name__} pad", lambda value, w=wrapper: w([[0]], True, value, **E), FLAGS)
        add(InvalidOptionError, f"{wrapper.__name__}", lambda value, w=wrapper: w(value, **E), [3, None, object(), int])
    for of_a_loader in (patch_dataloader_to_ddp, extract_loader_parameters, iter_with_mask):
        no_loaders = [
            each for each in NO_LOADERS if of_a_loader is not patch_dataloader_to_ddp or type(each) is not list
        ]
        add(NotALoaderError, of_a_loader.__name__, of_a_loader, no_loaders)
    add(NotALoaderError, "loader_state", lambda value: loader_state(value, batches_done=0), NO_LOADERS)
    add(NotALoaderError, "restore_loader", lambda value: restore_loader(value, {}), NO_LOADERS)
    add(NotALoaderError, "gather_in_order", lambda value: gather_in_order([], value), NO_LOADERS)
    add(NotALoaderError, "audit", lambda value: audited(value, 2), [None, 3, "x", [], [given(), 3], lambda: None])
    for guard in (check_loaders_is_patched, assert_loaders_patched):
        add(NotALoaderError, guard.__name__, guard, [None, 3, "x", b"", {1}, iter([]), *EMPTY])
    add(InvalidOptionError, "extract", lambda value: extract_loader_parameters(given(), value), ["x", 1, None])
    add(InvalidOptionError, "batches_done", lambda value: loader_state(after_a_pass(), batches_done=value), NO_COUNTS)
    add(StateError, "restore_loader", lambda value: restore_loader(patched(), value), [{}, None, 3, [], {"version": 1}])
    add(StateError, "load_state_dict", lambda value: patched().sampler.load_state_dict(value), [{}, None, "x"])
    add(InvalidOptionError, "set_epoch", lambda value: patched().set_epoch(value), [-1, 1.5, None, "1", [1]])
    add(InvalidOptionError, "audit world_size", lambda value: audited(given(), value), [0, None, *WHOLES])
    add(InvalidOptionError, "audit epochs", lambda value: audited(given(), 2, value), [0, None, "2"])
    for option in ("patch", "set_epoch", "padding", "epochs_differ"):
        add(InvalidOptionError, f"audit {option}", lambda value, o=option: audited(given(), 2, **{o: value}), ["no", 1])
    add(InvalidOptionError, "audit allow", lambda value: audited(given(), 2, allow=value), ["x", ["x"], 3, None, [3]])
    add(InvalidOptionError, "audit max_items", lambda value: audited(given(), 2, max_items=value), [0, "3", 1.5])
    add(InvalidOptionError, "audit timeout", lambda value: audited(given(), 2, timeout=value), SECONDS)
    add(InvalidOptionError, "audit factory", lambda value: audited(value, 2), [one_argument, three_arguments])
    add(NotALoaderError, "audit factory", lambda value: audited(value, 2), [returns_none])
    add(InvalidOptionError, "run_ranks", lambda value: ran(value, 1), [lambda rank, _: rank, local(), 3, None, "x"])
    add(InvalidOptionError, "run_ranks args", lambda value: ran(operator.add, 1, value), [lambda: 3])
    add(InvalidOptionError, "run_ranks world_size", lambda value: ran(operator.add, value), [0, None, *WHOLES])
    add(InvalidOptionError, "run_ranks timeout", lambda value: ran(operator.add, 1, timeout=value), [0, *SECONDS])
    add(InvalidOptionError, "run_ranks grace", lambda value: ran(operator.add, 1, grace=value), SECONDS)
    add(InvalidOptionError, "alike", lambda value: ran(operator.add, 1, alike=value), ["HOME", None, 3, [3]])
    return table


CALLS = calls()


@pytest.mark.parametrize(("error", "call"), [(error, call) for error, _, call in CALLS], ids=[n for _, n, _ in CALLS])
def test_bad_input_is_refused_by_an_error_of_this_package(error: type[DDPPatchError], call: Call) -> None:
    with pytest.raises(DDPPatchError) as caught:
        call()
    assert caught.type is error
    assert message_of(caught.value).endswith(".")


THREE: list[Any] = [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3]), np.array(3)]


@pytest.mark.parametrize("three", THREE, ids=repr)
def test_a_whole_number_may_be_numpys_or_torchs(three: Any) -> None:
    expected = patched(seed=3)
    loader = patched(seed=three)
    assert type(loader.sampler.seed) is int
    assert list(loader) == list(expected)
    twice = [DDPSamplerWrapper(range(8), True, **E, seed=seed) for seed in (three, 3)]
    assert list(twice[0]) == list(twice[1])
    assert len(patched(rank=three, num_replicas=4)) == 1
    loader = after_a_pass()
    assert loader_state(loader, batches_done=three) == loader_state(loader, batches_done=3)
    assert audit(given(), three).ok


@pytest.mark.parametrize("name", ["shuffle_samples_between_gpus", "pad_data_to_num_gpus"])
@pytest.mark.parametrize("wrapper", [by_wrapper, by_batches])
def test_a_number_of_ranks_where_catalyst_has_it(wrapper: Any, name: str) -> None:
    with raises(
        InvalidOptionError, (f"{name}=2", "int", "True", "False"), ("number of ranks", "num_replicas=", "rank=")
    ):
        wrapper([[0], [1]], **{name: 2}, **E)
    assert list(wrapper([[0], [1]], False, num_replicas=2, rank=1)) == [[1]]


# Every error and warning ends with the command that shows its section of docs/errors.md, and has that section.

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
    loaded(["explain", "--help"])()
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: ddp-patch explain NAME\n")
    assert "RankMismatchError" in shown
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


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if issubclass(kind, Warning)])
def test_a_warning_is_filtered_by_its_own_words(kind: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(TEXT, kind, stacklevel=1)
        warnings.filterwarnings("ignore", message=re.escape(TEXT))
        warnings.warn(TEXT, kind, stacklevel=1)
    (shown,) = caught
    assert str(shown.message) == f"{TEXT}\n{section(kind)}"
    assert section(kind) in warnings.formatwarning(shown.message, kind, "a.py", 1)
