"""The API server's checks of a job, done locally: one file for each step of admission. Called by `ctj_api.validate`."""
