"""The commands with torchrun that recipes show in their first lines, each started twice as these say."""

import shlex
import shutil
from pathlib import Path

import pytest
from commands import COMMANDS
from documented import CHECKOUT, WAYS, Run

EXAMPLES = CHECKOUT / "docs" / "examples"
OWN = [command for command, runner in COMMANDS.items() if runner == "tests/integrations/test_commands.py"]


@pytest.mark.torchrun
@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("command", [command for command in OWN if "docs/" not in command])
def test_a_recipe_that_is_started_again_goes_on(command: str, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for script in (EXAMPLES / "recipes").glob("*.py"):
        shutil.copy(script, tmp_path)
    printed = []
    for _ in range(2):
        status, output, error = run(f"cd {tmp_path} && {command.replace('FOLDER', shlex.quote(str(folder)))}")
        assert status == 0, error
        printed.append(output.splitlines())
    first, second = printed
    assert first
    assert second == first[len(first) - len(second) :]  # what the checkpoint does not hold


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("command", [command for command in OWN if "docs/" in command])
def test_a_metric_that_is_updated_in_each_step_is_that_of_one_process(command: str, run: Run) -> None:
    status, printed, error = run(command)
    assert status == 0, error
    assert "as in one process" in printed
