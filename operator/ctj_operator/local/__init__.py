"""The embedded backend: a folder for the API server, processes for Jobs. `ctj run` without a cluster."""
