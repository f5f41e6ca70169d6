"""Each remedy of what real ranks tell works as it is written, on the program that met the message."""

from remedied.on_ranks import wrong_on_two_ranks


def test_remedies_on_two_ranks() -> None:
    assert not wrong_on_two_ranks("ranks")
