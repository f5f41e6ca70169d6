"""The scripts of docs/examples/coming_from print what two ranks get, before the patch and after it, as expected.

The page docs/frameworks.md runs from_distributed_sampler.py, which needs no other package.
"""

import pytest
from documented import CHECKOUT, differs, run_twice

FOLDER = CHECKOUT / "docs" / "examples" / "coming_from"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
PRINTED = {
    "from_catalyst.py": """\
before, sampler:       4+4 steps, 20 of 26 seen, 6 repeated, new order
before, batch sampler: 4+4 steps, 18 of 26 seen, 10 repeated, 0 split, new order
after, sampler:        4+4 steps, 26 of 26 seen, 0 repeated, new order
after, batch sampler:  4+4 steps, 26 of 26 seen, 4 repeated, 0 split, new order
""",
    "from_open_metric_learning.py": """\
before, sampler:       4+4 steps, 16 of 26 seen, 10 repeated, new order
before, batch sampler: 4+4 steps, 22 of 26 seen, 8 repeated, 0 split, new order
after, sampler:        4+4 steps, 26 of 26 seen, 0 repeated, new order
after, batch sampler:  4+4 steps, 26 of 26 seen, 4 repeated, 0 split, new order
""",
    "from_accelerate.py": """\
before, sampler:       4+4 steps, 20 of 26 seen, 12 repeated, new order
before, batch sampler: 3+3 steps, 20 of 26 seen, 4 repeated, 0 split, new order
after, sampler:        4+4 steps, 26 of 26 seen, 0 repeated, new order
after, batch sampler:  4+4 steps, 26 of 26 seen, 4 repeated, 0 split, new order
split, sampler:        7+7 steps, 20 of 26 seen, 8 repeated, new order
split, batches:        7+6 steps, 26 of 26 seen, 0 repeated, 5 split, new order
split, unequal:        raises ValueError
divided, sampler:      7+7 steps, 26 of 26 seen, 0 repeated, new order
divided, batches:      7+7 steps, 26 of 26 seen, 0 repeated, 0 split, new order
divided, unequal:      7+7 steps, 26 of 26 seen, 4 repeated, new order
""",
    "from_lightning.py": """\
before, sampler:       4+4 steps, 16 of 26 seen, 10 repeated, new order
before, batch sampler: raises TypeError
after, sampler:        4+4 steps, 26 of 26 seen, 0 repeated, new order
after, batch sampler:  4+4 steps, 26 of 26 seen, 4 repeated, 0 split, new order
""",
    "from_ignite.py": """\
before, sampler:       4+4 steps, 26 of 26 seen, 0 repeated, same order
before, batch sampler: 7+7 steps, 26 of 26 seen, 26 repeated, 0 split, new order
after, sampler:        4+4 steps, 26 of 26 seen, 0 repeated, new order
after, batch sampler:  4+4 steps, 26 of 26 seen, 4 repeated, 0 split, new order
""",
    "from_ray.py": """\
before, sampler:       4+4 steps, 26 of 26 seen, 0 repeated, same order
before, batch sampler: raises TypeError
after, sampler:        4+4 steps, 26 of 26 seen, 0 repeated, new order
after, batch sampler:  4+4 steps, 26 of 26 seen, 4 repeated, 0 split, new order
""",
}
RAY = "from_ray.py"  # which starts the ranks itself
SCRIPTS = [pytest.param(name, marks=pytest.mark.ray) if name == RAY else name for name in PRINTED]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_what_two_ranks_get(name: str) -> None:
    starter = "python" if name == RAY else TORCHRUN
    for status, printed, error in run_twice(f"{starter} docs/examples/coming_from/{name}"):
        assert status == 0, error
        assert differs(PRINTED[name], printed) is None, error


def test_no_script_is_left_out() -> None:
    assert {path.name for path in FOLDER.glob("from_*.py")} == {*PRINTED, "from_distributed_sampler.py"}
