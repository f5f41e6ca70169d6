"""End sentences that begin with somebody else's message."""

__all__ = ["sentence"]


def sentence(text: str) -> str:
    """Return a text that ends where a sentence ends.

    Examples:
        >>> sentence("no such file"), sentence("Is it there?")
        ('no such file.', 'Is it there?')
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", ":", "…")) else f"{text}."
