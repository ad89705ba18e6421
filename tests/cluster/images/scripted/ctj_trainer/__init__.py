"""What `ctj_trainer` is in the image test/scripted."""
