"""Everything about torch.compile: where it is placed, watched, compared with eager, and given up."""
