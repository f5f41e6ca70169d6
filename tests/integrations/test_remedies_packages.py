"""Each remedy that is about a package works as it is written, on the program that met the message."""

from remedied.on_ranks import wrong_on_two_ranks


def test_remedies_with_packages() -> None:
    assert not wrong_on_two_ranks("packages")
