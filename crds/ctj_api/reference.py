"""The reference pages, rendered from the contract."""


def reference_pages() -> dict[str, str]:
    """Return file name -> Markdown."""
    return {}
