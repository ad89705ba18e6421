"""The deciding side: observes, decides, records, applies; and the `ctj` command. Never imports torch or ctj_trainer."""
