"""Draw every rank of a made-up world, and write down what each got."""

__all__: list[str] = []
