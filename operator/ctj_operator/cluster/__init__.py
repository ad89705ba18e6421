"""Jobs on Kubernetes: watches the API server, applies what the core decides. `python -m ctj_operator.cluster`."""
