"""The `ctj` command."""
