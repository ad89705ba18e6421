"""The embedded backend: a folder for the API server, local processes for Jobs."""
