"""The commands with torchrun that pages show outside of their console blocks, which need nothing but torch."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from commands import COMMANDS, READERS
from documented import CHECKOUT, WAYS, Run, run_on_twins
from quick import soaked

OWN = [command for command, runner in COMMANDS.items() if runner == "tests/ranks/test_commands_ranks.py"]


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("command", [soaked(command) if "restarts" in command else command for command in OWN])
def test_a_training_that_is_started_again_has_nothing_left(command: str, run: Run, tmp_path: Path) -> None:
    for starts in (1, 2) if run is run_on_twins else (1,):
        status, _, error = run(command.replace("FOLDER", shlex.quote(str(tmp_path))))
        assert status == 0, error
        assert len((tmp_path / "starts").read_text().splitlines()) == starts
        steps = [[*map(json.loads, (tmp_path / f"taken-{rank}").read_text().splitlines())] for rank in range(2)]
        assert [len(own) for own in steps] == [12 * 34] * 2  # epochs and steps, of the first start alone


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("command", [soaked(command) for command in READERS])
def test_a_script_of_the_readers_own(command: str, run: Run, tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / "docs" / "examples" / "ddp.py", tmp_path / "train.py")
    status, printed, error = run(f"cd {shlex.quote(str(tmp_path))} && {command}")
    assert status == 0, error
    assert printed.count("on 101 samples") == 3
