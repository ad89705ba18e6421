"""The `ctj` command line. Every module here is imported by the command that needs it, so that help stays instant."""
