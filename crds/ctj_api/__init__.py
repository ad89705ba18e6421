"""The contract between the deciding side (`ctj_operator`), the training side (`ctj_trainer`) and people.

Imports neither side, no torch and no Kubernetes client.
"""

__version__ = "0.1.0"
