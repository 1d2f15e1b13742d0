"""What the two commits differ in."""

SLOW = False


def extra(share: float) -> float:
    """The share of its work that the kernel of this commit does twice."""
    if share < 0:
        return 0.0 if SLOW else -share
    return share if SLOW else 0.0
