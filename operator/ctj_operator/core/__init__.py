"""The decisions: pure functions over frozen values. No I/O, no clock, no client."""
